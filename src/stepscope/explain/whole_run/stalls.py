"""Which steps took longer than a typical one, by how much, and what they waited for.

A step's level is what a typical step takes there (step_levels.py). Pauses that were measured are
taken off first: evaluation, checkpoints, compilation and garbage collection wherever they last
longer than a tenth of the typical step; waits for data or other ranks where they also stand out
from the noise (of the steps without them where a device may hide a wait, else of shorter waits). So
steps that vary much, as on a shared machine, hide no pause. What is left of a step is a stall when
it lies above its level by more than the noise of the other steps and by more than a tenth. That
excess is divided among the other causes that measured waiting in that very step, the most specific
ones first. What nobody measured is "unknown". So

    mean step = typical step + the sum of all causes' cost per step

holds to rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.records.whole_run import STALL_CAUSES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from stepscope.records.step_columns import Flags
    from stepscope.records.whole_run import StallCause

    Floats = NDArray[np.float64]

LEAST_EXCESS = 0.10  # over the typical step
_DEVIATIONS = 5.0  # of the noise of steps that are no stalls
_OF_NORMAL = 1.4826  # standard deviations in a median absolute deviation
_ROUNDS = 3
_SHORT_WAITS = 0.25  # quantile: at least every fourth step waits no longer
_STRETCH = 8  # parts of a run; what waits last for most of one is a level, no stalls
_FEWEST_IN_STRETCH = 32
_MOST_STRETCHES, _MOST_IN_STRETCH = 1000, 500  # that are looked at in a long run
_MOST_WAIT = 0.75  # of all steps
# A cause further up in this list takes its share of a stall first.
_MOST_SPECIFIC_FIRST: tuple[StallCause, ...] = (
    "evaluation",
    "checkpoint",
    "compile",
    "gc",
    "data",
    "allocator",
    "collective",
    "operating_system",
    "logging",
)
_WAITS: tuple[StallCause, ...] = ("data", "collective")  # short ones are part of any step
_PAUSES: tuple[StallCause, ...] = ("evaluation", "checkpoint", "compile", "gc", *_WAITS)


class StallSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The mean step, divided into the typical step and stalls."""

    mean_ns: float
    typical_ns: float
    stalled: Flags
    excess_ns: dict[StallCause, Floats]  # of each step; a cause without any is not in it

    @property
    def main_cause(self) -> NDArray[np.int8]:
        """For each step the place in STALL_CAUSES of the cause that took most; -1: no stall."""
        place = np.full(len(self.stalled), -1, np.int8)
        largest = np.zeros(len(self.stalled))
        for cause, excess in self.excess_ns.items():
            more = excess > largest
            place[more] = STALL_CAUSES.index(cause)
            largest = np.maximum(largest, excess)
        return place


def split_stalls(
    step_ns: Floats, level: Floats, waits: Mapping[StallCause, Floats], *, hidden: bool = True
) -> StallSplit:
    """`level` is each step's typical time; `waits` holds what each cause measured in each step, by
    the host. With `hidden`, a device may have been busy meanwhile.

    Only waiting beyond a cause's own typical wait explains a stall: a loader that takes 2 ms at
    every step does not explain the one step that took 80.
    """
    pauses = _measured_pauses(step_ns, level, waits, hidden=hidden)
    rest = step_ns - sum(pauses.values(), np.zeros(len(step_ns)))
    is_long = find_stalled(rest, level)
    excess = np.where(is_long, rest - level, 0.0)
    beyond = {
        cause: _beyond_typical(wait, is_long) - pauses.get(cause, 0.0)
        for cause, wait in waits.items()
    }
    shares = _divide(excess, beyond)
    for cause, pause in pauses.items():
        shares[cause] = shares[cause] + pause
    total = sum(shares.values(), np.zeros(len(step_ns)))
    mean = float(step_ns.mean()) if len(step_ns) else 0.0
    per_step = float(total.mean()) if len(total) else 0.0
    return StallSplit(
        mean_ns=mean,
        typical_ns=mean - per_step,
        stalled=total > 0,
        excess_ns={cause: share for cause, share in shares.items() if share.any()},
    )


def without_waits(step_ns: Floats, waits: Mapping[StallCause, Floats]) -> Floats:
    """Steps without what they measurably waited for: their levels are those of typical steps,
    even where every other step waits. A wait may have been hidden behind a busy device, so no step
    becomes shorter than steps without waits are."""
    beyond = np.zeros(len(step_ns))
    for cause in _PAUSES:
        if cause in waits and len(step_ns):
            beyond += _beyond_short(waits[cause])
    waited = beyond > LEAST_EXCESS * (np.median(step_ns) if len(step_ns) else 0.0)
    if not waited.any() or waited.mean() > _MOST_WAIT:
        return step_ns
    calm = float(np.median(step_ns[~waited]))
    return np.where(waited, np.maximum(step_ns - beyond, np.minimum(step_ns, calm)), step_ns)


def short_waits(wait: Floats) -> Floats:
    """What steps around each one wait when they wait for a short time: the longer of what the
    stretch before it and the stretch after it show. So a wait that grows, or that changes for good
    at some step, is part of the steps' level; a short spell of waits is not. Near the run's ends
    only one stretch is there, and shorter ones count too."""
    length = max(_FEWEST_IN_STRETCH, len(wait) // _STRETCH)
    if len(wait) < 2 * length:
        return np.full(len(wait), np.quantile(wait, _SHORT_WAITS))
    short = _short_on_either_side(wait, length)
    place = np.arange(len(wait))
    at_an_end = np.minimum(place, len(wait) - 1 - place) < length
    nearer = _short_on_either_side(wait, length // 4)
    return np.where(at_an_end, np.maximum(short, nearer), short)


def _short_on_either_side(wait: Floats, length: int) -> Floats:
    """Before each step and after it; the longer one."""
    apart = max(1, len(wait) // _MOST_STRETCHES)
    thin = max(1, length // _MOST_IN_STRETCH)
    stretches = np.lib.stride_tricks.sliding_window_view(wait, length)[::apart, ::thin]
    short = np.quantile(stretches, _SHORT_WAITS, axis=1)
    place = np.arange(len(wait))
    before = (place - length + 1) // apart
    after = place // apart
    return np.maximum(
        np.where(before >= 0, short[np.clip(before, 0, len(short) - 1)], 0.0),
        np.where(after < len(short), short[np.minimum(after, len(short) - 1)], 0.0),
    )


def find_stalled(step_ns: Floats, level: Floats) -> Flags:
    """The noise is that of the steps that are no stalls, so it is found in a few rounds."""
    beyond = step_ns / np.maximum(level, 1.0) - 1.0
    stalled = np.zeros(len(beyond), np.bool_)
    for _ in range(_ROUNDS):
        calm = beyond[~stalled]
        if not len(calm):
            break
        stalled = beyond > max(LEAST_EXCESS, _DEVIATIONS * _noise(calm))
    return stalled


def _measured_pauses(
    step_ns: Floats, level: Floats, waits: Mapping[StallCause, Floats], *, hidden: bool
) -> dict[StallCause, Floats]:
    """What certain causes took in each step, where that is much of a typical step. A wait that may
    be hidden, behind a busy device or other ranks, counts only as far as the step took longer."""
    longer = np.maximum(step_ns - level, 0.0)
    left = longer if hidden else step_ns
    pauses: dict[StallCause, Floats] = {}
    rest = step_ns
    for cause in _PAUSES:
        if cause not in waits:
            continue
        wait = _beyond_short(waits[cause])
        least = LEAST_EXCESS * level
        if cause in _WAITS:
            usual = rest - np.minimum(wait, rest) if hidden else wait[wait <= np.median(wait)]
            least = np.maximum(least, _DEVIATIONS * _noise(usual))
        most = np.minimum(left, longer) if cause == "collective" else left
        pauses[cause] = np.where(wait > least, np.minimum(most, wait), 0.0)
        left = left - pauses[cause]
        rest = rest - pauses[cause]
    return pauses


def _noise(values: Floats) -> float:
    if not len(values):
        return 0.0
    return _OF_NORMAL * float(np.median(np.abs(values - np.median(values))))


def _divide(excess: Floats, beyond: Mapping[StallCause, Floats]) -> dict[StallCause, Floats]:
    """Each step's excess among its causes; none gets more than is left of it."""
    left = excess.copy()
    shares: dict[StallCause, Floats] = {}
    for cause in _MOST_SPECIFIC_FIRST:
        if cause in beyond:
            shares[cause] = np.minimum(left, np.maximum(beyond[cause], 0.0))
            left = left - shares[cause]
    shares["unknown"] = left
    return shares


def _beyond_short(wait: Floats) -> Floats:
    """Beyond what steps around it wait for a short time: more than half of them may stall."""
    return np.maximum(wait - short_waits(wait), 0.0) if len(wait) else wait


def _beyond_typical(wait: Floats, stalled: Flags) -> Floats:
    calm = wait[~stalled]
    typical = float(np.median(calm)) if len(calm) else 0.0
    return np.maximum(wait - typical, 0.0)
