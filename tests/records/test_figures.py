"""Figures as text. tests/ui/html/js/format.test.js puts the same cases through the page's code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.text import figures

CASES = json.loads((Path(__file__).parent / "figures.json").read_text())


@pytest.mark.parametrize(("function", "value", "text"), CASES)
def test_figures_are_written_by_the_shared_rules(function: str, value: float, text: str) -> None:
    assert getattr(figures, function)(value) == text


@given(st.floats(min_value=1e-3, max_value=999.4))
def test_a_figure_has_three_digits_that_count(value: float) -> None:
    digits = figures.significant(value).replace(".", "").lstrip("0")
    assert len(digits) == 3


@given(st.floats(min_value=1e-3, max_value=1e9))
def test_a_figure_is_its_number_to_half_a_percent(value: float) -> None:
    assert float(figures.significant(value).replace(",", "")) == pytest.approx(value, rel=0.0051)


def test_rates_carry_their_unit() -> None:
    assert figures.rate(12.34e12, "FLOP/s") == "12.3 TFLOP/s"
    assert figures.rate(456e9, "B/s") == "456 GB/s"
    assert figures.rate(12, "B/s") == "12.0 B/s"


def test_changes_carry_their_sign() -> None:
    assert figures.signed_percent(0.042) == "+4.2%"
    assert figures.signed_percent(-0.364) == "-36%"
    assert figures.signed_percent(0.0) == "0%"
    assert figures.signed_percent(0.0043) == "+0.43%"


def test_many_times_as_much_is_not_written_as_percent() -> None:
    assert figures.relative_change(-0.364) == "-36%"
    assert figures.relative_change(1.99) == "+199%"
    assert figures.relative_change(2.0) == "3.0 times"
    assert figures.relative_change(28.26) == "29 times"
    assert figures.relative_interval(-0.04, 1.5) == "-4.0% to +150%"
    assert figures.relative_interval(0.82, 469.26) == "1.8 to 470 times"
    assert figures.relative_interval(-0.5, 4.0) == "0.50 to 5.0 times"
    assert figures.change_marks([28.26, 0.82, 469.26, 0.0]) == ["29x", "1.8x", "470x", "1x"]
    assert figures.change_marks([0.05, -0.04, 0.2, 0.0]) == ["+5.0%", "-4.0%", "+20%", "0"]
    assert figures.longer_or_shorter(28.26) == "29 times as long"
    assert figures.longer_or_shorter(0.364) == "36% longer"
    assert figures.longer_or_shorter(-0.9, longer="more", shorter="less") == "90% less"
    assert figures.unsigned_percent(-0.0043) == "0.43%"
    assert figures.signed(1.234) == "+1.23"
    assert figures.signed(-45.67) == "-45.7"
    assert figures.signed(0.0) == "0"


def test_powers_of_two_keep_their_round_numbers() -> None:
    assert figures.binary_size(1024) == "1 KiB"
    assert figures.binary_size(256 << 20) == "256 MiB"
    assert figures.binary_size(100) == "100 B"


def test_an_interval_shows_both_ends() -> None:
    assert figures.interval(30.123, 133.4) == "30.1 to 133"


def test_an_axis_shows_no_zeros_after_the_point() -> None:
    assert figures.trimmed(figures.size(10e6)) == "10 MB"
    assert figures.trimmed(figures.size(1e6)) == "1 MB"
    assert figures.trimmed(figures.size(2.5e6)) == "2.50 MB"


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.021, "2.1%"), (-0.0015, "0.15%"), (1.23e-7, "1.2e-7"), (-4.9e-4, "4.9e-4"), (0.0, "0%")],
)
def test_differences_of_any_size(share: float, text: str) -> None:
    assert figures.difference(share) == text


def test_a_mean_count_is_whole_where_it_can_be() -> None:
    assert [figures.mean_count(count) for count in (1.0, 24.0, 1200.0, 4 / 3)] == [
        "1",
        "24",
        "1,200",
        "1.33",
    ]
