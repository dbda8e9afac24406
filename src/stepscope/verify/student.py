"""Quantiles of Student's t distribution, for any number of degrees of freedom."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

_MOST_FREEDOM = 500.0  # beyond, it is the normal distribution
_ANGLES = np.linspace(-math.pi / 2, math.pi / 2, 8001)


def student_quantile(freedom: float, level: float) -> float:
    return _student(round(min(max(freedom, 1.0), _MOST_FREEDOM), 2), level)


@lru_cache(maxsize=4096)
def _student(freedom: float, level: float) -> float:
    """With t = sqrt(freedom) tan(angle), the angle's density is a power of its cosine."""
    density = np.maximum(np.cos(_ANGLES), 0.0) ** (freedom - 1)
    shares = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    angle = float(np.interp(level, shares / shares[-1], _ANGLES))
    return math.sqrt(freedom) * math.tan(angle)
