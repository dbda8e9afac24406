"""How much faster more threads make an operator that they can share."""

from __future__ import annotations

# A doubling of threads brings this power of two: memory and barriers keep the rest.
_POWER = 0.8


def speedup(threads: float, more: float) -> float:
    """Of long operators, from so many threads to more (or fewer, below 1)."""
    return float((max(more, 1.0) / max(threads, 1.0)) ** _POWER)
