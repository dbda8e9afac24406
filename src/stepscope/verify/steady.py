"""Which steps count: the first ones of a run often do not.

Leading steps are warm-up as long as the median of five of them lies far from the medians of five
in the run's second half: more than 3.5 of their standard deviations (by their median absolute
deviation) and more than 0.5%. Where more than a quarter of the run is like that it is no warm-up
but a slow spell or a drift, and all steps count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.verify.change import median_ratio

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

GROUP = 5
_FEWEST = 8 * GROUP  # in shorter runs there is nothing to tell a warm-up from
_LONGEST = 0.25  # of the run
_FAR, _LEAST = 3.5, 0.005
_DEVIATIONS = 1.4826  # of a normal distribution, in median absolute deviations
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
    settled = np.flatnonzero(near)
    first = int(settled[0]) if len(settled) else 0
    return GROUP * first if first <= _LONGEST * len(medians) else 0


def settled(steps: Floats) -> Floats:
    """The steps that count."""
    return steps[warm_up(steps) :]


def drift(steps: Floats) -> float | None:
    """How much longer the second half's steps are, as a share, where that is no chance."""
    if len(steps) < _FEWEST:
        return None
    half = len(steps) // 2
    found = median_ratio([steps[:half]], [steps[half:]])
    share = float(np.expm1(found.value))
    return share if not found.low <= 0 <= found.high and abs(share) >= _DRIFTS else None


def _medians(steps: Floats) -> Floats:
    whole = len(steps) // GROUP * GROUP
    medians: Floats = np.median(steps[:whole].reshape(-1, GROUP), axis=1)
    return medians
