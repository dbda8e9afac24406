"""The statistics that every room shares: medians, and how many standard deviations on either side
of its mean hold a share of a normal distribution.

numpy's own medians are the same, but import numpy.ma first: 14 ms. The standard library's
`statistics` imports random and decimal. The training process imports this file without numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NORMAL_90 = 1.645
NORMAL_95 = 1.96
NORMAL_95_PRECISE = 1.959964  # for comparing runs: scipy's to six digits
NORMAL_MAD = 1.4826  # of a distribution whose median absolute deviation is one


def median(values: NDArray[Any] | Sequence[Any]) -> float:
    """Return the middle value, or the mean of the middle two; NaN if there are none."""
    import numpy as np

    values = np.ravel(values)
    return float(medians(values)) if len(values) else math.nan


def medians(table: NDArray[Any] | Sequence[NDArray[Any]], axis: int = 0) -> NDArray[np.float64]:
    """Return the median of each column, or with `axis` 1 of each row; NaN where one is NaN."""
    import numpy as np

    table = np.asarray(table)
    half = table.shape[axis] // 2
    ordered = np.partition(table, (half, -1 - half, -1), axis)
    middle: NDArray[np.float64] = ordered.take((half, -1 - half), axis).mean(axis)
    if table.dtype.kind == "f":
        middle = np.where(np.isnan(ordered.take(-1, axis)), math.nan, middle)
    return middle


def quantile(values: NDArray[Any], share: float) -> float:
    """Interpolate between the two values around this share of a column, rounded as numpy does."""
    import numpy as np

    ordered = np.sort(values)
    low, part = divmod((len(ordered) - 1) * share, 1)
    a, b = float(ordered[int(low)]), float(ordered[min(int(low) + 1, len(ordered) - 1)])
    return a + (b - a) * part if part < 0.5 else b - (b - a) * (1 - part)
