"""Which steps took longer than a typical one, by how much, and what they waited for.

The typical step is the median of its level (see level_changes.py). A step is a stall when it lies
above that by more than the noise of the other steps and by more than a tenth. Its excess is divided
among the causes that measured waiting in that very step. What nobody measured is "unknown". So

    mean step = typical step + the sum of all causes' cost per step

holds to rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Flags = NDArray[np.bool_]
    Ints = NDArray[np.int64]

UNKNOWN = "unknown"
LEAST_EXCESS = 0.10  # over the typical step
_DEVIATIONS = 5.0  # of the noise of steps that are no stalls
_OF_NORMAL = 1.4826  # standard deviations in a median absolute deviation
_ROUNDS = 3


class StallCost(msgspec.Struct, frozen=True, kw_only=True):
    """One cause's share in the mean step."""

    cause: str
    steps: Ints  # places of the steps that stalled for it
    excess_ns: Floats  # what each of them took longer for it
    per_step_ns: float  # over all steps


class StallSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The mean step, divided into the typical step and stalls."""

    mean_ns: float
    typical_ns: float
    stalled: Flags
    causes: tuple[StallCost, ...]  # the most expensive first


def split_stalls(step_ns: Floats, level: Floats, waits: Mapping[str, Floats]) -> StallSplit:
    """`level` is each step's typical time; `waits` holds what each cause measured in each step.

    Only waiting beyond a cause's own typical wait explains a stall: a loader that takes 2 ms at
    every step does not explain the one step that took 80.
    """
    stalled = find_stalled(step_ns, level)
    excess = np.where(stalled, step_ns - level, 0.0)
    beyond = {cause: _beyond_typical(wait, stalled) for cause, wait in waits.items()}
    shares = _divide(excess, beyond)
    costs = [_cost(cause, share) for cause, share in shares.items() if share.any()]
    mean = float(step_ns.mean()) if len(step_ns) else 0.0
    per_step = float(excess.mean()) if len(excess) else 0.0
    return StallSplit(
        mean_ns=mean,
        typical_ns=mean - per_step,
        stalled=stalled,
        causes=tuple(sorted(costs, key=lambda cost: -cost.per_step_ns)),
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


def _beyond_typical(wait: Floats, stalled: Flags) -> Floats:
    calm = wait[~stalled]
    typical = float(np.median(calm)) if len(calm) else 0.0
    return np.maximum(wait - typical, 0.0)


def _divide(excess: Floats, beyond: Mapping[str, Floats]) -> dict[str, Floats]:
    """Each step's excess among its causes. Where they measured more than the excess (part of the
    wait was hidden), all shrink alike."""
    measured = sum(beyond.values(), np.zeros(len(excess)))
    scale = np.divide(
        np.minimum(excess, measured), measured, out=np.zeros(len(excess)), where=measured > 0
    )
    shares = {cause: wait * scale for cause, wait in beyond.items()}
    shares[UNKNOWN] = excess - sum(shares.values(), np.zeros(len(excess)))
    return shares


def _cost(cause: str, share: Floats) -> StallCost:
    steps = np.flatnonzero(share > 0)
    return StallCost(
        cause=cause,
        steps=steps,
        excess_ns=share[steps],
        per_step_ns=float(share.mean()),
    )
