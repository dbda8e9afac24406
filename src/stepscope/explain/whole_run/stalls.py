"""Which steps took longer than a typical one, by how much, and what they waited for.

A step's level is what a typical step takes there (level_changes.py). A step is a stall when it lies
above its level by more than the noise of the other steps and by more than a tenth. Its excess is
divided among the causes that measured waiting in that very step, the most specific ones first.
What nobody measured is "unknown". So

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


def split_stalls(step_ns: Floats, level: Floats, waits: Mapping[StallCause, Floats]) -> StallSplit:
    """`level` is each step's typical time; `waits` holds what each cause measured in each step.

    Only waiting beyond a cause's own typical wait explains a stall: a loader that takes 2 ms at
    every step does not explain the one step that took 80.
    """
    stalled = find_stalled(step_ns, level)
    excess = np.where(stalled, step_ns - level, 0.0)
    shares = _divide(excess, waits, stalled)
    mean = float(step_ns.mean()) if len(step_ns) else 0.0
    per_step = float(excess.mean()) if len(excess) else 0.0
    return StallSplit(
        mean_ns=mean,
        typical_ns=mean - per_step,
        stalled=stalled,
        excess_ns={cause: share for cause, share in shares.items() if share.any()},
    )


def find_stalled(step_ns: Floats, level: Floats) -> Flags:
    """The noise is that of the steps that are no stalls, so it is found in a few rounds."""
    ratio = np.log(np.maximum(step_ns, 1.0) / np.maximum(level, 1.0))
    stalled = np.zeros(len(ratio), np.bool_)
    for _ in range(_ROUNDS):
        calm = ratio[~stalled]
        if not len(calm):
            break
        noise = _OF_NORMAL * float(np.median(np.abs(calm - np.median(calm))))
        stalled = ratio > max(np.log1p(LEAST_EXCESS), _DEVIATIONS * noise)
    return stalled


def _divide(
    excess: Floats, waits: Mapping[StallCause, Floats], stalled: Flags
) -> dict[StallCause, Floats]:
    """Each step's excess among its causes; none gets more than is left of it."""
    left = excess.copy()
    shares: dict[StallCause, Floats] = {}
    for cause in _MOST_SPECIFIC_FIRST:
        if cause in waits:
            shares[cause] = np.minimum(left, _beyond_typical(waits[cause], stalled))
            left = left - shares[cause]
    shares["unknown"] = left
    return shares


def _beyond_typical(wait: Floats, stalled: Flags) -> Floats:
    calm = wait[~stalled]
    typical = float(np.median(calm)) if len(calm) else 0.0
    return np.maximum(wait - typical, 0.0)
