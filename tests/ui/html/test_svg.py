"""Pieces of charts: places, ticks, and names that stay inside them."""

from __future__ import annotations

import pytest

from stepscope.ui.html.svg import (
    LogAxes,
    drawing,
    log_levels,
    path,
    rect,
    round_values,
    short_tick,
    text,
)


@pytest.fixture
def axes():
    return LogAxes(left=10, right=110, top=0, bottom=100, x_low=1, x_high=100, y_low=1, y_high=10)


def test_equal_factors_are_equal_distances(axes):
    assert [axes.x(value) for value in (1, 10, 100)] == pytest.approx([10, 60, 110])
    assert [axes.y(value) for value in (1, 10)] == pytest.approx([100, 0])
    assert axes.inside(1e6, 0.1) == (110, 100)


def test_levels_are_round_and_few():
    assert log_levels(1, 10, 7) == [1, 2, 5, 10]
    assert len(log_levels(1, 1e9, 6)) <= 6
    assert round_values(12.0, 6) == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert round_values(0, 6) == []


@pytest.mark.parametrize(
    ("words", "short"),
    [("2.00 GB", "2 GB"), ("1.50 ms", "1.5 ms"), ("100 µs", "100 µs"), ("0", "0")],
)
def test_ticks_lose_zeros_that_say_nothing(words, short):
    assert short_tick(words) == short


def test_names_are_escaped():
    hostile = "</text><img>"
    pieces = text("tick", 1, 2, hostile) + rect("", 0, 0, "50%", 1, title=hostile)
    whole = drawing(10, 10, hostile, [pieces, path("line", [(0, 0), (1.25, 2)], title=hostile)])
    assert "<img" not in whole
    assert 'd="M0 0L1.2 2"' in whole
