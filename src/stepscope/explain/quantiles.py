"""Medians and quantiles. numpy's own are the same, but import numpy.ma first: 14 ms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stepscope.explain.arrays import Floats


def quantile(values: NDArray[Any] | Sequence[float], share: float) -> float:
    """Interpolates between two values. There must be at least one value."""
    ordered = np.sort(values)
    return float(np.interp((len(ordered) - 1) * share, np.arange(len(ordered)), ordered))


def median(values: NDArray[Any] | Sequence[float]) -> float:
    """The middle one, or the mean of the middle two."""
    return float(medians(np.asarray(values)))


def medians(table: NDArray[Any] | Sequence[NDArray[Any]]) -> Floats:
    """The median of each column."""
    ordered = np.sort(table, axis=0)
    half = len(ordered) // 2
    middle: Floats = (ordered[half] + ordered[-1 - half]) / 2
    return middle
