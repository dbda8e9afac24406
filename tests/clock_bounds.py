"""What rounds of two ranks say about the offset of their clocks: an oracle for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def offset_bounds(
    rounds_a: Iterable[Sequence[int]], rounds_b: Iterable[Sequence[int]]
) -> tuple[int, int] | None:
    """The bounds of clock B minus clock A; None when the rounds contradict each other.

    No rank leaves a round before every rank has come, so in every round B came before A left and A
    came before B left.
    """
    low: int | None = None
    high: int | None = None
    for (came_a, left_a), (came_b, left_b) in zip(rounds_a, rounds_b, strict=True):
        low = came_b - left_a if low is None else max(low, came_b - left_a)
        high = left_b - came_a if high is None else min(high, left_b - came_a)
    if low is None or high is None or low > high:
        return None
    return low, high
