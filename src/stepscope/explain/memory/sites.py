"""Where the memory held at the peak was allocated: operator, module, line of the user's code.

Backward runs without Python frames: its blocks are attributed to the forward operator's call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.call_tree import group, sum_by
from stepscope.explain.memory.lifetimes import BACKWARD
from stepscope.explain.modules import PREFIX
from stepscope.explain.python_functions import place_of, user_frames
from stepscope.explain.work import rows_named
from stepscope.records.memory import CATEGORIES, ModuleBytes, SiteBytes
from stepscope.records.trace import HostKind
from stepscope.trace.links import nearest, nearest_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from stepscope.explain.memory.lifetimes import Lifetimes
    from stepscope.records.trace import Trace

    Int32 = NDArray[np.int32]
    Int64 = NDArray[np.int64]
    Rows = NDArray[np.intp]

MOST_SITES = 300
MOST_MODULES = 200
OUTSIDE = "(outside modules)"
UNKNOWN = "(unknown)"
OTHERS = "(others)"
BEFORE = "(before the trace began)"
_ACTIVATIONS = CATEGORIES.index("activations")


def sites_at(trace: Trace, lifetimes: Lifetimes, row: int) -> tuple[SiteBytes, ...]:
    """Largest first; memory from before the window is a row of its own."""
    alive = lifetimes.alive_at(row)
    around = lifetimes.host[alive]
    operator = _names(trace, _operators(trace, around))
    frame = _names(trace, _user_frames(trace, around))
    rows = _grouped(operator, frame, lifetimes.category[alive], lifetimes.size_bytes[alive])
    out = []
    for (code, place, category), (size, blocks) in rows:
        source = place_of(trace.strings[place]) if place >= 0 else None
        name = trace.strings[code].removeprefix(f"{BACKWARD}: ") if code >= 0 else UNKNOWN
        out.append(
            SiteBytes(
                operator=name,
                size_bytes=size,
                blocks=blocks,
                category=CATEGORIES[category],
                file=source.file if source else None,
                line=source.line if source else None,
                function=source.function if source else "",
            )
        )
    before = int(lifetimes.allocated_bytes[row]) - int(lifetimes.size_bytes[alive].sum())
    if before > 0:
        out.append(SiteBytes(operator=BEFORE, size_bytes=before, blocks=0))
    return largest_sites(out)


def largest_sites(sites: Iterable[SiteBytes], most: int = MOST_SITES) -> tuple[SiteBytes, ...]:
    """Largest first; the rest is one row, so that the sum stays."""
    ranked = sorted(sites, key=lambda site: -site.size_bytes)
    rest = ranked[most:]
    if not rest:
        return tuple(ranked)
    size, blocks = sum(site.size_bytes for site in rest), sum(site.blocks for site in rest)
    return (*ranked[:most], SiteBytes(operator=OTHERS, size_bytes=size, blocks=blocks))


def modules_at(trace: Trace, lifetimes: Lifetimes, row: int) -> tuple[ModuleBytes, ...]:
    """Activations held at the peak by the innermost module; empty without recorded modules."""
    host = trace.host
    python = host.kind == HostKind.PYTHON
    module = rows_named(trace, host, python, lambda name: name.startswith(PREFIX))
    if not module.any():
        return ()
    alive = lifetimes.alive_at(row)
    alive = alive[lifetimes.category[alive] == _ACTIVATIONS]
    codes = _names(trace, nearest_of(host, module, lifetimes.host[alive]))
    none = np.full(len(codes), -1, np.int32)
    rows = _grouped(codes, none, none.astype(np.int8), lifetimes.size_bytes[alive])
    return tuple(
        ModuleBytes(
            module=trace.strings[code].removeprefix(PREFIX) if code >= 0 else OUTSIDE,
            size_bytes=size,
            tensors=blocks,
        )
        for (code, _, _), (size, blocks) in rows[:MOST_MODULES]
    )


def _operators(trace: Trace, rows: Int32) -> Int32:
    """The outermost operator around each row: aten::linear rather than aten::empty."""
    host = trace.host
    operator = host.kind == HostKind.OPERATOR
    parent = np.maximum(host.parent, 0)
    below = (host.parent >= 0) & (nearest(host, operator)[parent] >= 0)
    return nearest_of(host, operator & ~below, rows)


def _user_frames(trace: Trace, rows: Int32) -> Int32:
    host = trace.host
    forward = _looked_up(host.forward_of, nearest_of(host, host.forward_of >= 0, rows))
    own = user_frames(trace, rows)
    return np.where(own >= 0, own, user_frames(trace, forward))


def _names(trace: Trace, rows: Int32) -> Int32:
    return _looked_up(trace.host.name, rows)


def _looked_up(column: Int32, rows: Int32) -> Int32:
    """The column at these rows; -1 stays -1."""
    out = np.full(len(rows), -1, np.int32)
    known = rows >= 0
    out[known] = column[rows[known]]
    return out


def _grouped(
    first: Int32, second: Int32, third: NDArray[np.int8], sizes: Int64
) -> list[tuple[tuple[int, int, int], tuple[int, int]]]:
    """(codes, (bytes, blocks)) of every distinct triple, largest first."""
    sample, inverse, count = group(first, second, third)
    total = sum_by(inverse, sizes, count)
    blocks = np.bincount(inverse, minlength=count)
    order = np.argsort(-total, kind="stable")
    codes = (column[sample[order]].tolist() for column in (first, second, third))
    sums = zip(total[order].tolist(), blocks[order].tolist(), strict=True)
    return list(zip(zip(*codes, strict=True), sums, strict=True))
