"""Collectives of one rank by kind, group and size. Their time includes waiting for other ranks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain import call_tree
from stepscope.records.explanation import Collective
from stepscope.records.job import KINDS
from stepscope.records.lazy_pattern import lazy_pattern

if TYPE_CHECKING:
    from stepscope.explain.arrays import Indices
    from stepscope.records.job import CollectiveCalls
    from stepscope.records.trace import CollectiveArgs

DTYPE_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "unsigned char": 1, "signed char": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2, "short": 2,
    "int": 4, "float": 4, "long": 8, "long int": 8, "double": 8,
}  # fmt: skip
_KINDS = (
    (lazy_pattern(r"all_?reduce|cross_device_reduce", re.I), "all_reduce"),
    (lazy_pattern(r"all_?gather", re.I), "all_gather"),
    (lazy_pattern(r"reduce_?scatter", re.I), "reduce_scatter"),
    (lazy_pattern(r"all_?to_?all", re.I), "all_to_all"),
    (lazy_pattern(r"broadcast", re.I), "broadcast"),
    (lazy_pattern(r"barrier", re.I), "barrier"),
    (lazy_pattern(r"send_?recv", re.I), "send_recv"),
    (lazy_pattern(r"send", re.I), "send"),
    (lazy_pattern(r"recv|receive", re.I), "recv"),
    (lazy_pattern(r"gather", re.I), "gather"),
    (lazy_pattern(r"scatter", re.I), "scatter"),
    (lazy_pattern(r"reduce", re.I), "reduce"),
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


def list_collectives(calls: CollectiveCalls) -> tuple[Collective, ...]:
    """Longest total first."""
    if not len(calls):
        return ()
    _, inverse, count = call_tree.group(calls.kind, calls.group, calls.size_bytes)
    out = [_summarise(calls, np.flatnonzero(inverse == code)) for code in range(count)]
    return tuple(sorted(out, key=lambda collective: -collective.total_ns))


def size_bytes(args: CollectiveArgs) -> int | None:
    """Total bytes: the output of an all-gather, the input of everything else."""
    width = DTYPE_BYTES.get(args.dtype.lower())
    elements = args.out_elements if kind_of(args.name) == "all_gather" else args.in_elements
    return elements * width if width and elements >= 0 else None


def _summarise(calls: CollectiveCalls, rows: Indices) -> Collective:
    """Calls of one kind, group and size as one row."""
    kind, size = KINDS[calls.kind[rows[0]]], int(calls.size_bytes[rows[0]])
    group = calls.groups[calls.group[rows[0]]]
    start, end = calls.start_ns[rows], calls.end_ns[rows]
    total = int((end - start).sum())
    algbw = size * len(rows) / total if size >= 0 and total else None
    ranks = group.size
    return Collective(
        kind=kind,
        group=group.name,
        group_size=group.size,
        size_bytes=size if size >= 0 else None,
        count=len(rows),
        total_ns=total,
        exposed_ns=int(calls.exposed_ns[rows].sum()),
        algbw_gb_s=algbw,
        busbw_gb_s=algbw * bus_factor(kind, ranks) if algbw is not None and ranks else None,
    )
