"""The host's own time of a step, from steps in which it never waited for the device."""

from __future__ import annotations

from statistics import median_low
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.quantiles import median
from stepscope.explain.replay.graph import QUEUE_DEPTH
from stepscope.records.step_columns import USUAL_PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stepscope.records.host_steps import HostStepTimes
    from stepscope.records.step_columns import StepColumns

    Floats = NDArray[np.float64]
    Flags = NDArray[np.bool_]

_PHASES = ("data", "forward", "backward", "optimizer")
_FEWEST = 2
_DISTURBED = 0.25  # quantile: what disturbs a step only adds
_OTHER_STOPS = 0.25  # of the usual number
_FULL = 0.75  # of the queue: inside a step more may wait than at its end
# A step that begins with an empty queue ends with the most launches that ever wait. Steps of hosts
# that find it full end with 0.87 of it or more.
_FULL_AFTER_EMPTY = 0.83


def host_phases_ns(
    measured: Sequence[HostStepTimes], steps: StepColumns | None, launches: int | None
) -> dict[str, int]:
    """By phase; empty if too few steps tell. `launches` of a step that calls nothing that waits for
    the device, else None.

    Whatever disturbs either kind of step only adds: the shorter counts. A kind with too few steps
    of its own joins the other. Plain steps bound the phases in which the host does not wait, even
    if it waits in another one.
    """
    own_ns = own_phases_ns(measured)
    among_ranks = any(not step.alone for step in measured)
    if among_ranks or steps is None:
        return own_ns
    if launches is None:
        others_ns = plain_phases_ns(steps) if own_ns else {}
    else:
        others_ns = free_phases_ns(steps, launches, () if own_ns else measured)
    names = own_ns or others_ns
    return {name: min(ns[name] for ns in (own_ns, others_ns) if name in ns) for name in names}


def own_phases_ns(steps: Sequence[HostStepTimes]) -> dict[str, int]:
    """By phase; empty if too few steps were measured, or other ranks trained: the queue then fills
    up inside the step.

    Stopping inside forward costs a little, and not stopping may let the queue fill up: both only
    add, so the shorter of the two counts.
    """
    own = [step for step in steps if step.alone]
    if len(own) < _FEWEST:
        return {}
    kinds = [_typical([step for step in own if step.fine == fine]) for fine in (False, True)]
    return {
        phase: round(min(_median_ns(kind, phase) for kind in kinds if kind)) for phase in _PHASES
    }


def _typical(steps: list[HostStepTimes]) -> list[HostStepTimes]:
    """Without those that were stopped far more or less often: they have more passes or fewer, as
    every fifth step has in which a generator trains too."""
    usual = median_low(step.stops for step in steps) if steps else 0
    return [step for step in steps if abs(step.stops - usual) <= _OTHER_STOPS * usual]


def free_phases_ns(
    steps: StepColumns, launches: int, own: Sequence[HostStepTimes] = ()
) -> dict[str, int]:
    """By phase, from plain steps in which the host never found the queue full, and from steps of
    its `own`; empty if they are too few.

    To wait only adds, and so do cold caches and other programs. Where plain steps in general spend
    less on a phase than the free ones, the host does not wait there either: the shorter counts.
    """
    free = _free(steps, launches)
    if np.count_nonzero(free) + len(own) < _FEWEST:
        return {}
    plain = steps.plain & ~_after_ours(steps)
    return {phase: round(_phase_ns(steps, phase, free, plain, own)) for phase in USUAL_PHASES}


def plain_phases_ns(steps: StepColumns) -> dict[str, int]:
    """By phase, what plain steps spend with all their waits: the host never needs more."""
    plain = steps.plain & ~_after_ours(steps)
    if np.count_nonzero(plain) < _FEWEST:
        return {}
    nothing = np.zeros(len(steps), np.bool_)
    return {phase: round(_phase_ns(steps, phase, nothing, plain, ())) for phase in USUAL_PHASES}


def _phase_ns(
    steps: StepColumns, phase: str, free: Flags, plain: Flags, own: Sequence[HostStepTimes]
) -> float:
    column = steps.phases_ns.get(phase, np.zeros(len(steps), np.int64))
    own_ns = [float(getattr(step, f"{phase}_ns")) for step in own] if phase in _PHASES else []
    kinds = (np.concatenate((column[free], own_ns)), column[plain])
    return min((float(np.quantile(kind, _DISTURBED)) for kind in kinds if len(kind)), default=0.0)


def _free(steps: StepColumns, launches: int) -> Flags:
    """Steps of the host that ended before the queue was full. The first ones after our own work
    run with cold caches and clear up after it: they count only if there are too few others, and
    those that nearly filled the queue only if there are still too few."""
    first = _after_ours(steps)
    ahead = _launches_ahead(steps, first, launches)
    free = steps.plain & (ahead < _FULL * QUEUE_DEPTH)
    for kind in (free & ~first, free & first):
        if np.count_nonzero(kind) >= _FEWEST:
            return kind
    return steps.plain & first & (ahead < _FULL_AFTER_EMPTY * QUEUE_DEPTH)


def _after_ours(steps: StepColumns) -> Flags:
    """Plain steps right after a window or a step of ours: they begin with an empty queue."""
    ours = steps.window | steps.memory
    after = np.zeros(len(steps), np.bool_)
    after[1:] = ours[:-1] & (np.diff(steps.number) == 1)
    return after & steps.plain


def _launches_ahead(steps: StepColumns, first: Flags, launches: int) -> Floats:
    """How many launches wait in the queue when the host ends a step; infinite where not known."""
    ahead = np.full(len(steps), np.inf)
    if steps.device_ns is None:
        ahead[first] = 0.0 if launches <= QUEUE_DEPTH else np.inf
        return ahead
    known = steps.plain & (steps.device_ns >= 0)
    for begin in np.flatnonzero(first & known):
        rest = np.flatnonzero(~known[begin:] | (np.diff(steps.number[begin - 1 :]) != 1))
        end = begin + (int(rest[0]) if len(rest) else len(steps) - begin)
        host_ns = np.cumsum(steps.wall_ns[begin:end])
        device_ns = np.cumsum(steps.device_ns[begin:end])
        done = np.interp(host_ns, np.concatenate(([0], device_ns)), np.arange(end - begin + 1))
        ahead[begin:end] = launches * (np.arange(1, end - begin + 1) - done)
    return ahead


def _median_ns(steps: Sequence[HostStepTimes], phase: str) -> float:
    return median([float(getattr(step, f"{phase}_ns")) for step in steps])
