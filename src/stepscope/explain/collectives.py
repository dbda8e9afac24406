"""Collectives of one rank by kind, group and size. Their time includes waiting for other ranks."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.explain import intervals
from stepscope.explain.work import Kind
from stepscope.records.explanation import Collective
from stepscope.records.trace import ABSENT, HostKind
from stepscope.trace.links import nearest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.work import Work
    from stepscope.records.trace import CollectiveArgs, Trace

_DTYPE_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "unsigned char": 1, "signed char": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2, "short": 2,
    "int": 4, "float": 4, "long": 8, "long int": 8, "double": 8,
}  # fmt: skip
_KINDS = (
    (re.compile(r"all_?reduce", re.I), "all_reduce"),
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
    """Longest total first."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    codes = _recorded(trace, work)
    for row in np.flatnonzero(work.kind == Kind.COMM).tolist():
        key = _describe(trace, work, row, int(codes[row]))
        if key:
            groups.setdefault(key, []).append(row)
    out = [_summarise(work, key, np.array(rows)) for key, rows in groups.items()]
    return tuple(sorted(out, key=lambda each: -each.total_ns))


def _recorded(trace: Trace, work: Work) -> NDArray[np.int32]:
    """Collective metadata of each piece of work: on the kernel itself, or on the call around it."""
    if work.on_host or not len(trace.collectives):
        return np.full(len(work), ABSENT, np.int32)
    around = nearest(trace.host, trace.host.collective >= 0)
    launch = trace.device.launch[work.rows]
    call = np.where(launch >= 0, around[np.maximum(launch, 0)], ABSENT)
    of_call = np.where(call >= 0, trace.host.collective[np.maximum(call, 0)], ABSENT)
    own = trace.device.collective[work.rows]
    return np.where(own >= 0, own, of_call).astype(np.int32)


def _describe(
    trace: Trace, work: Work, row: int, code: int
) -> tuple[str, str, int | None, int | None] | None:
    at = int(work.rows[row])
    if work.on_host:
        if trace.host.kind[at] != HostKind.ANNOTATION:
            return None  # c10d:: calls only start what the gloo: span then does
        kind = kind_of(trace.strings[trace.host.name[at]])
        return kind, "", trace.world_size, _host_bytes(trace, at)
    if code < 0:
        return kind_of(trace.strings[trace.device.name[at]]), "", None, None
    args = trace.collectives[code]
    ranks = args.group_size if args.group_size > 0 else None
    return kind_of(args.name), args.group, ranks, size_bytes(args)


def size_bytes(args: CollectiveArgs) -> int | None:
    """Total bytes: the output of an all-gather, the input of everything else."""
    width = _DTYPE_BYTES.get(args.dtype.lower())
    elements = args.out_elements if kind_of(args.name) == "all_gather" else args.in_elements
    return elements * width if width and elements >= 0 else None


def _host_bytes(trace: Trace, row: int) -> int | None:
    shapes, dtypes = int(trace.host.shapes[row]), int(trace.host.dtypes[row])
    if shapes < 0 or dtypes < 0:
        return None
    try:
        dims = msgspec.json.decode(trace.strings[shapes], type=list[list[int]])
        names = msgspec.json.decode(trace.strings[dtypes], type=list[str])
    except msgspec.DecodeError:
        return None
    pairs = zip(dims, names, strict=False)
    return sum(_DTYPE_BYTES.get(name.lower(), 0) * math.prod(dim) for dim, name in pairs) or None


def _summarise(work: Work, key: tuple[Any, ...], rows: Any) -> Collective:
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
