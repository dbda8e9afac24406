"""Values that users write: 2, 0.5, x2."""

from __future__ import annotations

import math

from stepscope.predict.outcome import WrongValue

_FACTORS = {0.5: "half", 2.0: "twice"}


def parse_positive(name: str, value: str, wanted: str) -> float:
    """Raises WrongValue for anything but a positive number."""
    try:
        number = float(value.removeprefix("x"))
    except ValueError:
        number = 0.0
    if not number > 0 or not math.isfinite(number):
        raise WrongValue(f"{name}={value}: give {wanted}")
    return number


def parse_whole(value: str) -> int:
    """A whole number; 0 for anything else, which no what-if takes."""
    try:
        return int(value)
    except ValueError:
        return 0


def describe_factor(value: str) -> str:
    """2 is twice, 0.5 is half, 3 is 3 times."""
    try:
        factor = float(value.removeprefix("x"))
    except ValueError:
        return value
    return _FACTORS.get(factor) or f"{factor:g} times"
