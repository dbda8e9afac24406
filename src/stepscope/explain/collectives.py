"""Collectives of one rank by kind, group and size. Their time includes waiting for other ranks."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain import intervals
from stepscope.explain.work import Kind
from stepscope.records.explanation import Collective
from stepscope.records.trace import ABSENT, HostKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.work import Work
    from stepscope.records.trace import CollectiveArgs, Trace

    _Key = tuple[str, str, int | None, int | None]  # kind, group, group size, bytes

_DTYPE_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "unsigned char": 1, "signed char": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2, "short": 2,
    "int": 4, "float": 4, "long": 8, "long int": 8, "double": 8,
}  # fmt: skip
_KINDS = (
    (re.compile(r"all_?reduce|cross_device_reduce", re.I), "all_reduce"),
    (re.compile(r"all_?gather", re.I), "all_gather"),
    (re.compile(r"reduce_?scatter", re.I), "reduce_scatter"),
    (re.compile(r"all_?to_?all", re.I), "all_to_all"),
    (re.compile(r"broadcast", re.I), "broadcast"),
    (re.compile(r"barrier", re.I), "barrier"),
    (re.compile(r"send_?recv", re.I), "send_recv"),
    (re.compile(r"send", re.I), "send"),
    (re.compile(r"recv|receive", re.I), "recv"),
    (re.compile(r"gather", re.I), "gather"),
    (re.compile(r"scatter", re.I), "scatter"),
    (re.compile(r"reduce", re.I), "reduce"),
)


def kind_of(name: str) -> str:
    """The collective's name in our vocabulary, from any library's kernel or call name."""
    return next((kind for pattern, kind in _KINDS if pattern.search(name)), "other")


def bus_factor(kind: str, ranks: int) -> float:
    """busbw = algbw x this."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


def list_collectives(trace: Trace, work: Work) -> tuple[Collective, ...]:
    """Longest total first. Calls are described once for each distinct way they were recorded."""
    rows = np.flatnonzero(work.kind == Kind.COMM)
    if work.on_host:  # c10d:: calls only start what the gloo: span then does
        rows = rows[trace.host.kind[work.rows[rows]] == HostKind.ANNOTATION]
    if not len(rows):
        return ()
    recorded = _recorded(trace, work)[rows]
    distinct, inverse = np.unique(recorded, axis=0, return_inverse=True)
    members: dict[_Key, list[int]] = {}
    for code, told in enumerate(distinct.tolist()):
        members.setdefault(_describe(trace, work, *told), []).append(code)
    out = [
        _summarise(work, key, rows[np.isin(inverse.reshape(-1), codes)])
        for key, codes in members.items()
    ]
    return tuple(sorted(out, key=lambda each: -each.total_ns))


def _recorded(trace: Trace, work: Work) -> NDArray[np.int32]:
    """Per piece of work what tells about it: name, then metadata (on the kernel itself, else on
    the call around its launch); on the CPU, name, shapes and dtypes."""
    host, device, rows = trace.host, trace.device, work.rows
    if work.on_host:
        return np.stack((host.name[rows], host.shapes[rows], host.dtypes[rows]), axis=1)
    own, launch = device.collective[rows], device.launch[rows]
    if len(host):
        around = nearest_of(host, host.collective >= 0, launch)
        known = (around >= 0) & (own < 0)
        own = np.where(known, host.collective[np.maximum(around, 0)], own)
    return np.stack((device.name[rows], own), axis=1)


def _describe(trace: Trace, work: Work, name: int, metadata: int, dtypes: int = ABSENT) -> _Key:
    kind = kind_of(trace.strings[name])
    if work.on_host:
        ranks = _host_group_size(trace)
        size = _host_bytes(trace, metadata, dtypes)
        if kind == "all_gather" and size is not None:
            size = size * ranks if ranks else None  # recorded is what this rank gives
        return kind, "", ranks, size
    if metadata < 0:
        return kind, "", None, None
    args = trace.collectives[metadata]
    return kind_of(args.name), args.group, max(args.group_size, 0) or None, size_bytes(args)


def _host_group_size(trace: Trace) -> int | None:
    """gloo spans do not name their group: its size is known where all groups have the same."""
    sizes = {group.get("pg_size") for group in trace.groups} or {trace.world_size}
    size = sizes.pop()
    return size if not sizes and isinstance(size, int) and size > 0 else None


def size_bytes(args: CollectiveArgs) -> int | None:
    """Total bytes: the output of an all-gather, the input of everything else."""
    width = _DTYPE_BYTES.get(args.dtype.lower())
    elements = args.out_elements if kind_of(args.name) == "all_gather" else args.in_elements
    return elements * width if width and elements >= 0 else None


def _host_bytes(trace: Trace, shapes: int, dtypes: int) -> int | None:
    if shapes < 0 or dtypes < 0:
        return None
    try:
        dims = msgspec.json.decode(trace.strings[shapes], type=list[list[int]])
        names = msgspec.json.decode(trace.strings[dtypes], type=list[str])
    except msgspec.DecodeError:
        return None
    pairs = zip(dims, names, strict=False)
    return sum(_DTYPE_BYTES.get(name.lower(), 0) * math.prod(dim) for dim, name in pairs) or None


def _summarise(work: Work, key: _Key, rows: NDArray[np.intp]) -> Collective:
    kind, group, ranks, size = key
    start, end = work.start_ns[rows], work.end_ns[rows]
    total = int((end - start).sum())
    exposed = intervals.subtract(intervals.union(start, end), work.compute)
    algbw = size * len(rows) / total if size is not None and total else None
    return Collective(
        kind=kind,
        group=group,
        group_size=ranks,
        size_bytes=size,
        count=len(rows),
        total_ns=total,
        exposed_ns=intervals.length(exposed),
        algbw_gb_s=algbw,
        busbw_gb_s=algbw * bus_factor(kind, ranks) if algbw is not None and ranks else None,
    )
