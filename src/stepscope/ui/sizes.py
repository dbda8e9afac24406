"""Sizes as people type them: 8GB, 24GiB."""

from __future__ import annotations

import re

from stepscope.errors import UsageError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 1 << 10 * power for power, unit in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?)?B?", re.IGNORECASE)


def parse_size(text: str, option: str) -> int:
    """8GB, 24GiB, a number of bytes. Raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    size = round(float(match[1]) * _UNITS[(match[2] or "").capitalize()]) if match else 0
    if size <= 0:
        raise UsageError(f"{option} {text!r}: write 8GB, 24GiB or a number of bytes")
    return size
