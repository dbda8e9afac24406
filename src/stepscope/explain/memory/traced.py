"""Memory from a trace's allocator events alone: a step's timeline, its peak, its categories.

Memory held from before the window is divided only if gradients come and go: every
trained parameter has a gradient of its size, and the optimizer's name says what it keeps for each.
What is not known is "other", and a note says so.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.memory.batch import batch_line
from stepscope.explain.memory.captured import fragmentation_of
from stepscope.explain.memory.growth import growth_of_trace
from stepscope.explain.memory.lifetimes import OPTIMIZER, MemoryPhase, find_lifetimes
from stepscope.explain.memory.sites import modules_at, sites_at
from stepscope.explain.memory.timeline import step_timeline
from stepscope.explain.work import rows_named
from stepscope.records.memory import CATEGORIES, Memory
from stepscope.records.trace import HostKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.memory.lifetimes import Lifetimes
    from stepscope.records.explanation import Steps
    from stepscope.records.memory import BatchLine, Categories
    from stepscope.records.trace import Trace

    Int64 = NDArray[np.int64]

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
    trace: Trace, lifetimes: Lifetimes, levels: Int64
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


def _categories(peak: Int64, kept: NDArray[np.int64], levels: Int64) -> Categories:
    """At the peak; a category that the trace never shows is unknown."""
    known = (kept != 0) | levels.any(axis=1)
    known[_ALWAYS_KNOWN] = True
    return {name: int(peak[code]) if known[code] else None for code, name in enumerate(CATEGORIES)}
