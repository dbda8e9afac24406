"""How sure a mean step is, though neighbouring steps are alike and stalls come in bursts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

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
    half = _student(batches - 1) * float(means.std(ddof=1)) / math.sqrt(batches)
    return max(0.0, mean - half), mean + half


def _student(freedom: int) -> float:
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _STUDENT_MORE
