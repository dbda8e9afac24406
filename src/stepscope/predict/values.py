"""Numbers that users write: 2, 0.5, x2."""

from __future__ import annotations

import math

from stepscope.predict.outcome import WrongValue


def parse_positive(name: str, value: str, wanted: str) -> float:
    """Refuses what is no positive number."""
    try:
        number = float(value.removeprefix("x"))
    except ValueError:
        number = 0.0
    if not number > 0 or not math.isfinite(number):
        raise WrongValue(f"{name}={value}: give {wanted}")
    return number
