"""Decide which steps count: warm-up, the start-up of a trial, drift, pauses of the machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepscope.records.normal import median
from stepscope.step.statistics import block_medians, spread
from stepscope.verify.change import median_ratio
from stepscope.verify.spread import Floats

# Which steps count: the first ones of a run are often warm-up.
#
# Steps are taken in groups of five. Leading groups are warm-up while their median lies far from the
# medians of the run's second half: by more than 3.5 standard deviations (from the median absolute
# deviation) and more than 0.5%. If that holds for more than a quarter of the run, it is a slow
# spell or a drift, not a warm-up, and all steps count.

GROUP = 5
_FEWEST = 8 * GROUP  # in shorter runs a warm-up cannot be told apart
_LONGEST = 0.25  # of the run
_FAR, _LEAST = 3.5, 0.005
_DRIFTS = 0.01


def warm_up(steps: Floats) -> int:
    """Return how many of the first steps to leave out."""
    if len(steps) < _FEWEST:
        return 0
    medians = block_medians(steps, GROUP)
    later = medians[len(medians) // 2 :]
    middle = median(later)
    near = np.abs(medians - middle) <= max(_FAR * spread(later), _LEAST * middle)
    first = int(near.argmax())
    return GROUP * first if first <= _LONGEST * len(medians) else 0


def drift(steps: Floats) -> float | None:
    """Return how much longer the second half's steps are, as a share; None if it may be chance."""
    if len(steps) < _FEWEST:
        return None
    half = len(steps) // 2
    ratio = median_ratio([steps[:half]], [steps[half:]])
    share = float(np.expm1(ratio.value))
    return share if not ratio.low <= 0 <= ratio.high and abs(share) >= _DRIFTS else None


# Which steps of a trial count, and the mean step that they give.
#
# A trial is one start of the command for a few dozen steps. Its first steps compile, try algorithms
# and grow the allocator's pools. A loader that makes every n-th step wait is part of the training,
# so the mean counts, not the median; but one pause of the machine must not decide.

FEWEST_STEPS = 10  # steady ones; fewer say nothing
_FIRST = 5  # steps that never count, where the trial has four times as many
_MOST_FIRST = 0.25  # of a shorter trial
_START_UP = 2.0  # times the longest step of the second half: that is no stall that comes again
_PER_PAUSE = 50  # steps for each pause of the machine that is left out


def steady_steps(steps_ms: Sequence[float] | Floats) -> Floats:
    """A trial's steps without its start-up, in order.

    Left out are the first five steps (at most a quarter), the warm-up that steady.py finds, and
    all up to the last step of the first half that took twice as long as any in the second half:
    a compilation or a search for algorithms. A stall that comes again is in both halves.
    """
    steps = np.asarray(steps_ms, np.float64)
    first = max(min(_FIRST, int(_MOST_FIRST * len(steps))), warm_up(steps))
    half = len(steps) // 2
    if half:
        single = np.flatnonzero(steps[:half] > _START_UP * steps[half:].max())
        if len(single):
            first = max(first, int(single[-1]) + 1)
    return steps[first:]


def without_pauses(steps_ms: Sequence[float] | Floats) -> Floats:
    """Count the longest step as long as the next longest; two of them from 50 steps on, and so on.

    A stall that comes more often than that keeps its length, because the next longest is one too.
    What comes once in a whole trial cannot be told from a pause of the machine.
    """
    steps = np.asarray(steps_ms, np.float64)
    pauses = 1 + len(steps) // _PER_PAUSE
    if len(steps) <= pauses:
        return steps
    longest = np.partition(steps, len(steps) - 1 - pauses)[len(steps) - 1 - pauses]
    shortened: Floats = np.minimum(steps, longest)
    return shortened
