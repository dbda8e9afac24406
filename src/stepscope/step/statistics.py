"""Quantiles, spreads, medians of blocks, and how sure a mean is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.normal import NORMAL_MAD, median, medians
from stepscope.step.arrays import Floats


def quantile(values: NDArray[Any] | Sequence[float], share: float) -> float:
    """Interpolates between two values. There must be at least one value."""
    ordered = np.sort(values)
    return float(np.interp((len(ordered) - 1) * share, np.arange(len(ordered)), ordered))


def lower_median(values: Sequence[float]) -> float:
    """The middle one; of an even number, the smaller of the middle two."""
    return sorted(values)[(len(values) - 1) // 2]


def spread(values: Floats) -> float:
    """Robust standard deviation."""
    if not len(values):
        return 0.0
    return NORMAL_MAD * median(np.abs(values - median(values)))


def block_medians(values: Floats, size: int) -> Floats:
    """One median per block; the rest at the end that fills no block is left out."""
    whole = len(values) // size * size
    return medians(values[:whole].reshape(-1, size), axis=1)


# How sure a mean step is, though neighbouring steps are alike and stalls come in bursts.

_BATCHES = 20  # of consecutive steps, whose means show how sure the mean is
_STUDENT = (12.7, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # 97.5%, freedom 1, 2, ...
_STUDENT_MORE = 2.1  # 11 to 19


def mean_interval(step_ns: Floats) -> tuple[float, float]:
    """The mean's 95% interval, by the means of consecutive batches: neighbours are alike."""
    mean = float(step_ns.mean())
    batches = min(_BATCHES, len(step_ns))
    if batches < 2:
        return mean, mean
    size = len(step_ns) // batches
    means = step_ns[: size * batches].reshape(batches, size).mean(axis=1)
    freedom = batches - 1
    half = (
        (_STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _STUDENT_MORE)
        * float(means.std(ddof=1))
        / math.sqrt(batches)
    )
    return max(0.0, mean - half), mean + half
