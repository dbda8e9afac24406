"""Microseconds as files write them become whole nanoseconds, exactly."""

from __future__ import annotations

import math
from decimal import ROUND_HALF_EVEN, Decimal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepscope.trace.formats.plausible_values import (
    INVALID_NS,
    LIMIT_DUR_NS,
    LIMIT_NS,
    NeedsTextError,
    durations_to_ns,
    microseconds_to_ns,
    text_to_ns,
)

SMALL_NS = st.integers(-(2**42) * 1000, 2**42 * 1000)  # what a double holds to the ns
ANY_NS = st.integers(-LIMIT_NS + 1, LIMIT_NS - 1)


def three_decimals(ns: int) -> str:
    """1234567 ns -> 1234.567, as Kineto prints microseconds."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"


def by_decimal(text: str) -> int:
    return int((Decimal(text) * 1000).to_integral_value(ROUND_HALF_EVEN))


@given(st.lists(SMALL_NS, min_size=1, max_size=50))
def test_three_decimals_below_three_months_are_exact_from_doubles(times: list[int]) -> None:
    assert microseconds_to_ns([float(three_decimals(ns)) for ns in times]).tolist() == times


@given(st.lists(ANY_NS, min_size=1, max_size=50))
@example([1_700_000_000_123_456_789, 1_700_000_000_123_456_790])
def test_three_decimals_on_any_base_are_exact_from_text(times: list[int]) -> None:
    assert text_to_ns([three_decimals(ns).encode() for ns in times]).tolist() == times


@given(st.lists(st.integers(-(2**62) // 1000 + 1, 2**62 // 1000 - 1), min_size=1))
def test_whole_microseconds_are_exact_on_any_base(times: list[int]) -> None:
    expected = [us * 1000 for us in times]
    assert microseconds_to_ns(times).tolist() == expected
    assert microseconds_to_ns([*times, None, 0.5]).tolist() == [*expected, INVALID_NS, 500]


@given(
    st.decimals(-(10**12), 10**12, allow_nan=False, allow_infinity=False, places=None),
    st.sampled_from(["{:f}", "{:e}", "{:E}"]),
)
def test_any_spelling_of_a_number_is_read_from_text(number: Decimal, spelling: str) -> None:
    text = spelling.format(number)
    assert text_to_ns([text.encode()]).tolist() == [by_decimal(text)]


@given(st.floats(-1e12, 1e12))
def test_doubles_with_more_decimals_are_right_to_the_nanosecond(number: float) -> None:
    exact = Decimal(number) * 1000
    assert abs(int(microseconds_to_ns([number])[0]) - exact) <= Decimal("0.6")


def test_epoch_microseconds_with_decimals_ask_for_their_text() -> None:
    with pytest.raises(NeedsTextError):
        microseconds_to_ns([1.0, 1_700_000_000_123_456.789])


@pytest.mark.parametrize(
    "value", [None, math.nan, 2**62, -(2**62), 10**30, -(10**400), 10**400], ids=str
)
def test_a_value_that_is_not_a_time_is_invalid(value: object) -> None:
    assert microseconds_to_ns([value]).tolist() == [INVALID_NS]
    assert microseconds_to_ns([value, 1, 2.5]).tolist() == [INVALID_NS, 1000, 2500]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"true",
        b'"soon"',
        b"{}",
        b"[1]",
        b"NaN",
        b"-Infinity",
        b"1e999999999",
        b"1e99999999999999999999",
        b"9" * 5000,
        b"1" * 41 + b".5",
        b"-" + b"9" * 6000 + b".25",
        b"\xff\xfe",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_text_that_is_not_a_time_is_invalid_and_rejected_quickly(text: bytes) -> None:
    assert text_to_ns([text]).tolist() == [INVALID_NS]


def test_quoted_numbers_are_read_from_text() -> None:
    assert text_to_ns([b'"1700000000123456.789"', b'" 2.5 "']).tolist() == [
        1_700_000_000_123_456_789,
        2500,
    ]


@given(st.lists(st.one_of(st.none(), st.integers(), st.floats(allow_nan=False))))
def test_durations_never_ask_for_text_and_flag_what_is_too_long(values: list[object]) -> None:
    found = durations_to_ns([*values, -(10**400), 10**400])
    assert found[-2] < 0 < LIMIT_DUR_NS < found[-1]
    found = found[:-2]
    assert len(found) == len(values)
    for value, ns in zip(values, found.tolist(), strict=True):
        if value is None:
            assert ns == INVALID_NS
        elif -0.0004 < value < LIMIT_DUR_NS / 1000:  # half a nanosecond below zero is zero
            assert abs(ns - Decimal(value) * 1000) <= Decimal("0.6")
        else:
            assert ns < 0 or ns >= LIMIT_DUR_NS


def test_no_values_give_an_empty_column() -> None:
    for found in (microseconds_to_ns([]), text_to_ns([]), durations_to_ns([])):
        assert found.dtype == np.int64
        assert len(found) == 0
