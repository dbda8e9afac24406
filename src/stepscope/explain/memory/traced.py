"""Memory from a trace's allocator events alone: a step's timeline, its peak, and where the
memory held there was allocated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.explain.host_calls import PREFIX, place_of, user_frames
from stepscope.explain.memory.captured import batch_line, fragmentation_of
from stepscope.explain.memory.lifetimes import (
    BACKWARD,
    OPTIMIZER,
    Lifetimes,
    MemoryPhase,
    find_lifetimes,
    growth_of_trace,
    step_timeline,
)
from stepscope.records.explanation import Steps
from stepscope.records.memory import (
    CATEGORIES,
    BatchLine,
    Categories,
    Memory,
    ModuleBytes,
    SiteBytes,
)
from stepscope.records.trace import HostKind, Trace
from stepscope.step.arrays import Int32s, Int64s
from stepscope.step.call_tree import group, sum_by
from stepscope.step.work import rows_named
from stepscope.trace.links import nearest, nearest_of

# Memory held from before the window is divided only if gradients come and go: every trained
# parameter has a gradient of its size, and the optimizer's name says what it keeps for each. What
# is not known is "other", and a note says so.

# Values of a parameter's size that an optimizer keeps for each.
KEPT = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta"), 2),
    **dict.fromkeys(("Adagrad", "RMSprop", "Lion"), 1),
}
_OPTIMIZER_NAME = re.compile(r"^Optimizer\.step#(\w+)\.step$")
_PARAMETERS, _GRADIENTS, _OPTIMIZER, _OTHER = (
    CATEGORIES.index(name) for name in ("parameters", "gradients", "optimizer", "other")
)
_ALWAYS_KNOWN = [CATEGORIES.index(name) for name in ("activations", "temporaries", "other")]


class TracedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The account, and its lines against the batch."""

    memory: Memory
    peak: Categories
    kept_other_bytes: int  # of "other" at the peak, what was there before the window
    in_optimizer: bool

    def lines(self, cast_bytes: int) -> tuple[BatchLine, ...]:
        """Memory from before the window is fixed, whatever it is."""
        held = {name: size or 0 for name, size in self.peak.items()}
        held["other"] -= self.kept_other_bytes
        held["buffers"] = held.get("buffers", 0) + self.kept_other_bytes
        flags = {"in_optimizer": self.in_optimizer, "other_scales": True}
        return (batch_line("peak", {**held}, cast_bytes=cast_bytes, **flags),)


def memory_of_trace(trace: Trace, steps: Steps) -> TracedMemory | None:
    """None without allocator events."""
    lifetimes = find_lifetimes(trace)
    if lifetimes is None:
        return None
    levels = lifetimes.levels()
    held, notes = _held_before(trace, lifetimes, levels)
    levels += held[:, None]
    # Take the last of equal peaks: the window shows everything that its step allocated.
    peak = int(np.flatnonzero(lifetimes.allocated_bytes == lifetimes.allocated_bytes.max())[-1])
    allocated = int(lifetimes.allocated_bytes[peak])
    levels[_OTHER] += lifetimes.allocated_bytes - levels.sum(axis=0)
    reserved = None if lifetimes.on_cpu else int(lifetimes.reserved_bytes[peak])
    timeline = step_timeline(lifetimes, levels, peak, steps)
    categories = _categories(levels[:, peak], held, levels)
    memory = Memory(
        source="trace",
        device="cpu" if lifetimes.on_cpu else trace.kind,
        peak_bytes=allocated,
        reserved_bytes=reserved,
        phase=MemoryPhase(int(lifetimes.phase[peak])).label,
        measured="the window's highest point, from the allocator events of the trace",
        categories=categories,
        by_module=modules_at(trace, lifetimes, peak),
        by_site=sites_at(trace, lifetimes, peak),
        timeline=timeline,
        fragmentation=fragmentation_of(allocated, reserved),
        growth=growth_of_trace(lifetimes, steps),
        notes=tuple(notes),
    )
    return TracedMemory(
        memory=memory,
        peak=categories,
        kept_other_bytes=int(held[_OTHER]),
        in_optimizer=int(lifetimes.phase[peak]) == MemoryPhase.OPTIMIZER,
    )


def _held_before(
    trace: Trace, lifetimes: Lifetimes, levels: Int64s
) -> tuple[NDArray[np.int64], list[str]]:
    """What was held all along, by category."""
    held = np.zeros(len(CATEGORIES), np.int64)
    notes = []
    if not lifetimes.agrees and not lifetimes.on_cpu:
        notes.append("allocator events are missing from the trace: what they moved is in other")
    if lifetimes.on_cpu:
        notes.append("what was allocated before the window is not known on the CPU: not counted")
        return held, notes
    whole, gradients = lifetimes.kept_bytes, int(levels[_GRADIENTS].max(initial=0))
    name = optimizer_name(trace)
    values = KEPT.get(name or "", 0)
    if gradients and whole >= (1 + values) * gradients:
        held[_PARAMETERS], held[_OPTIMIZER] = gradients, values * gradients
        how = f"{name} keeps {values} values for each" if values else "its state is in other"
        notes.append(
            "parameters are taken to be as large as their gradients; the optimizer: "
            + (how if name else "not marked in the trace, its state is in other")
        )
    elif whole:
        notes.append(
            "a trace does not say what was allocated before it began: parameters, gradients and "
            "optimizer state are in other (`stepscope run` separates them)"
        )
    held[_OTHER] = whole - int(held.sum())
    return held, notes


def optimizer_name(trace: Trace) -> str | None:
    """AdamW for `Optimizer.step#AdamW.step`; None without marks, or with several names."""
    host = trace.host
    annotated = host.kind != HostKind.PYTHON
    rows = rows_named(trace, host, annotated, lambda name: name.startswith(OPTIMIZER))
    codes = np.flatnonzero(np.bincount(host.name[rows], minlength=1))
    names = {match[1] for code in codes if (match := _OPTIMIZER_NAME.match(trace.strings[code]))}
    return names.pop() if len(names) == 1 else None


def _categories(peak: Int64s, kept: NDArray[np.int64], levels: Int64s) -> Categories:
    """At the peak; a category that the trace never shows is unknown."""
    known = (kept != 0) | levels.any(axis=1)
    known[_ALWAYS_KNOWN] = True
    return {name: int(peak[code]) if known[code] else None for code, name in enumerate(CATEGORIES)}


# Where the memory held at the peak was allocated: operator, module, line of the user's code.
#
# Backward runs without Python frames: its blocks are attributed to the forward operator's call.

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
    host = trace.host
    forward = _looked_up(host.forward_of, nearest_of(host, host.forward_of >= 0, around))
    own = user_frames(trace, around)
    frame = _names(trace, np.where(own >= 0, own, user_frames(trace, forward)))
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


def _operators(trace: Trace, rows: Int32s) -> Int32s:
    """The outermost operator around each row: aten::linear rather than aten::empty."""
    host = trace.host
    operator = host.kind == HostKind.OPERATOR
    parent = np.maximum(host.parent, 0)
    below = (host.parent >= 0) & (nearest(host, operator)[parent] >= 0)
    return nearest_of(host, operator & ~below, rows)


def _names(trace: Trace, rows: Int32s) -> Int32s:
    return _looked_up(trace.host.name, rows)


def _looked_up(column: Int32s, rows: Int32s) -> Int32s:
    """The column at these rows; -1 stays -1."""
    out = np.full(len(rows), -1, np.int32)
    known = rows >= 0
    out[known] = column[rows[known]]
    return out


def _grouped(
    first: Int32s, second: Int32s, third: NDArray[np.int8], sizes: Int64s
) -> list[tuple[tuple[int, int, int], tuple[int, int]]]:
    """(codes, (bytes, blocks)) of every distinct triple, largest first."""
    sample, inverse, count = group(first, second, third)
    total = sum_by(inverse, sizes, count)
    blocks = np.bincount(inverse, minlength=count)
    order = np.argsort(-total, kind="stable")
    codes = (column[sample[order]].tolist() for column in (first, second, third))
    sums = zip(total[order].tolist(), blocks[order].tolist(), strict=True)
    return list(zip(zip(*codes, strict=True), sums, strict=True))
