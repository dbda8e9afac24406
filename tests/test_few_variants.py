"""`few` leaves variants of a test to `make test-slow`."""

from __future__ import annotations

import pytest

from few_variants import is_one_of


@pytest.mark.parametrize(
    ("wanted", "count", "chosen"),
    [(3, 6, [0, 2, 4]), (2, 5, [0, 3]), (1, 2, [0]), (5, 3, [0, 1, 2]), (4, 4, [0, 1, 2, 3])],
)
def test_few_are_spread_evenly_from_the_first_on(
    wanted: int, count: int, chosen: list[int]
) -> None:
    assert [number for number in range(count) if is_one_of(wanted, number, count)] == chosen
