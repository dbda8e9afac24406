"""Which steps of a trial count, and the mean step that they give.

A trial is one start of the command for a few dozen steps. Its first steps compile, try algorithms
and grow the allocator's pools. A loader that makes every n-th step wait is part of the training,
so the mean counts, not the median; but one pause of the machine must not decide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.verify.steady import warm_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.verify.spread import Floats

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
