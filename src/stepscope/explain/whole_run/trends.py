"""Steps that grow with time, or with what they are fed: robust lines through the steps.

A trend is the median slope between distant steps (Theil and Sen), tested by how often later steps
are longer than earlier ones (Mann and Kendall). Spikes hardly move either.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from stepscope.records.whole_run import InputEffect, Trend

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_BLOCKS = 120
_FEWEST_BLOCKS = 12
_SURE = 3.3  # standard errors: by chance once in a thousand runs
_LEAST_GROWTH = 0.03  # over the whole run
_LEAST_EXPLAINED = 0.3  # of the variance that steps have


def find_trend(values: Floats) -> Trend | None:
    """None where values do not grow or shrink over the run, by more than chance and by 3%."""
    size = max(1, len(values) // _BLOCKS)
    whole = len(values) // size * size
    blocks = np.median(values[:whole].reshape(-1, size), axis=1)
    n = len(blocks)
    if n < _FEWEST_BLOCKS:
        return None
    first, second = np.triu_indices(n, 1)
    rises = blocks[second] - blocks[first]
    kendall = float(np.sign(rises).sum())
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    slopes = np.sort(rises / (second - first))
    slope = float(np.median(slopes))
    start = float(np.median(blocks - slope * np.arange(n)))
    if abs(kendall) < _SURE * deviation or start <= 0:
        return None
    half = 1.96 * deviation / 2
    middle = len(slopes) / 2
    low, high = (
        float(slopes[min(max(int(middle + side * half), 0), len(slopes) - 1)]) for side in (-1, 1)
    )
    start -= slope / 2  # a block's median stands for its middle
    growth = slope * n / start
    if abs(growth) < _LEAST_GROWTH:
        return None
    return Trend(
        growth=growth,
        low=low * n / start,
        high=high * n / start,
        per_step=slope / size,
    )


def find_input_effect(step_ns: Floats, elements: Floats) -> InputEffect | None:
    """A line through steps against the elements of their batch; None where it explains little."""
    if len(step_ns) < 2 * _FEWEST_BLOCKS or len(np.unique(elements)) < 3:
        return None
    calm = step_ns <= np.quantile(step_ns, 0.99)
    x, y = elements[calm], step_ns[calm]
    variance = float(y.var())
    spread = float(x.var())
    if not variance or not spread:
        return None
    slope = float(((x - x.mean()) * (y - y.mean())).mean() / spread)
    explained = slope**2 * spread / variance
    if slope <= 0 or explained < _LEAST_EXPLAINED:
        return None
    fixed = float(y.mean() - slope * x.mean())
    return InputEffect(
        explained=explained,
        fixed_ms=fixed / 1e6,
        per_element_ms=slope / 1e6,
        fewest=int(x.min()),
        most=int(x.max()),
    )
