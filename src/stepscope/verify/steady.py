"""Which steps count: the first ones of a run are often warm-up.

Steps are taken in groups of five. Leading groups are warm-up while their median lies far from the
medians of the run's second half: by more than 3.5 standard deviations (from the median absolute
deviation) and more than 0.5%. If that holds for more than a quarter of the run, it is a slow spell
or a drift, not a warm-up, and all steps count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.verify.change import median_ratio

if TYPE_CHECKING:
    from stepscope.verify.spread import Floats

GROUP = 5
_FEWEST = 8 * GROUP  # in shorter runs a warm-up cannot be told apart
_LONGEST = 0.25  # of the run
_FAR, _LEAST = 3.5, 0.005
_DEVIATIONS = 1.4826  # standard deviation of a normal distribution over its median absolute one
_DRIFTS = 0.01


def warm_up(steps: Floats) -> int:
    """How many of the first steps to leave out."""
    if len(steps) < _FEWEST:
        return 0
    medians = _medians(steps)
    later = medians[len(medians) // 2 :]
    middle = float(np.median(later))
    deviation = _DEVIATIONS * float(np.median(np.abs(later - middle)))
    near = np.abs(medians - middle) <= max(_FAR * deviation, _LEAST * middle)
    first = int(near.argmax())
    return GROUP * first if first <= _LONGEST * len(medians) else 0


def drift(steps: Floats) -> float | None:
    """How much longer the second half's steps are, as a share; None if it may be chance."""
    if len(steps) < _FEWEST:
        return None
    half = len(steps) // 2
    ratio = median_ratio([steps[:half]], [steps[half:]])
    share = float(np.expm1(ratio.value))
    return share if not ratio.low <= 0 <= ratio.high and abs(share) >= _DRIFTS else None


def _medians(steps: Floats) -> Floats:
    whole = len(steps) // GROUP * GROUP
    medians: Floats = np.median(steps[:whole].reshape(-1, GROUP), axis=1)
    return medians
