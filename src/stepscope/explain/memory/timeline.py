"""Memory through one step, thinned for charts and JSON; its extremes stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.memory.lifetimes import MemoryPhase
from stepscope.records.memory import CATEGORIES, MemoryTimeline, PhaseSpan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.memory.lifetimes import Lifetimes
    from stepscope.records.explanation import Steps

    Int64 = NDArray[np.int64]

BINS = 200


def thinned(time: Int64, level: Int64, bins: int = BINS) -> NDArray[np.intp]:
    """Rows of the highest and the lowest point of every bin of time, in order; first and last."""
    if len(time) <= 2 * bins:
        return np.arange(len(time))
    which = (time - time[0]) // (int(time[-1] - time[0]) // bins + 1)
    order = np.lexsort((level, which))
    starts = np.flatnonzero(np.diff(which[order], prepend=-1))
    ends = np.append(starts[1:], len(order)) - 1
    chosen = np.concatenate((order[starts], order[ends], [0, len(time) - 1]))
    return np.flatnonzero(np.bincount(chosen, minlength=len(time)))


def step_timeline(lifetimes: Lifetimes, levels: Int64, peak: int, steps: Steps) -> MemoryTimeline:
    """The step that contains the peak, or the whole window."""
    time = lifetimes.time_ns
    low, high, start, name = 0, len(time), int(time[0]), "the whole window"
    for step in steps.steps:
        end = step.start_ns + step.dur_ns
        if step.start_ns <= time[peak] < end:
            low, high = (int(at) for at in np.searchsorted(time, (step.start_ns, end)))
            start, name = step.start_ns, step.name
    rows = low + thinned(time[low:high], lifetimes.allocated_bytes[low:high])
    return MemoryTimeline(
        of=name,
        start_ns=start,
        time_ns=tuple((time[rows] - start).tolist()),
        allocated_bytes=tuple(lifetimes.allocated_bytes[rows].tolist()),
        reserved_bytes=None if lifetimes.on_cpu else tuple(lifetimes.reserved_bytes[rows].tolist()),
        categories={
            category: tuple(levels[code, rows].tolist())
            for code, category in enumerate(CATEGORIES)
            if levels[code].any()
        },
        phases=_phases(lifetimes, low, high, start),
    )


def _phases(lifetimes: Lifetimes, low: int, high: int, start: int) -> tuple[PhaseSpan, ...]:
    """Forward before each backward, backward, the optimizer's step; everything else is unnamed."""
    phase, time = lifetimes.phase[low:high], lifetimes.time_ns[low:high]
    edges = np.flatnonzero(np.diff(phase, prepend=-1))
    codes = [MemoryPhase(code) for code in phase[edges].tolist()]
    ends = np.append(time[edges[1:]], time[-1:]).tolist()
    out = []
    for place, (edge, code, end) in enumerate(zip(edges.tolist(), codes, ends, strict=True)):
        before_backward = place + 1 < len(codes) and codes[place + 1] == MemoryPhase.BACKWARD
        trains = code in (MemoryPhase.BACKWARD, MemoryPhase.OPTIMIZER)
        if trains or (code == MemoryPhase.FORWARD and before_backward):
            began = int(time[edge])
            out.append(PhaseSpan(name=code.label, start_ns=began - start, dur_ns=end - began))
    return tuple(out)
