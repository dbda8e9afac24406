"""How much faster more threads make an operator that they can share."""

from __future__ import annotations

# Doubling the threads gives two to this power: memory and barriers cost the rest.
_POWER = 0.8


def speedup(threads: float, more: float) -> float:
    """The speedup of long operators from `threads` to `more` threads; below 1 for fewer."""
    return float((max(more, 1.0) / max(threads, 1.0)) ** _POWER)
