"""Intervals, quantiles and the call tree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.step import intervals
from stepscope.step.call_tree import distinct_counts, distinct_places, group
from stepscope.step.intervals import Set
from stepscope.step.statistics import median, medians, quantile

# Interval algebra against sets of integers, where every point can be counted.

# A span covers the integers start, start + 1, .., end - 1; spans of length 0 cover none.
spans = st.lists(
    st.tuples(st.integers(-40, 40), st.integers(0, 12)).map(lambda at: (at[0], at[0] + at[1])),
    max_size=12,
)


def columns(pairs: list[tuple[int, int]]) -> Set:
    starts, ends = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(starts, np.int64), np.array(ends, np.int64)


def united(pairs: list[tuple[int, int]]) -> Set:
    return intervals.union(*columns(pairs))


def points(pairs: list[tuple[int, int]]) -> set[int]:
    return {point for start, end in pairs for point in range(start, end)}


def points_of(of: Set) -> set[int]:
    return points(list(zip(of[0].tolist(), of[1].tolist(), strict=True)))


def disjoint_and_sorted(of: Set) -> bool:
    return bool((of[0] <= of[1]).all() and (of[0][1:] > of[1][:-1]).all())


@given(spans)
def test_union_covers_the_same_points_disjoint_and_sorted(pairs: list[tuple[int, int]]) -> None:
    union = united(pairs)
    assert points_of(union) == points(pairs)
    assert disjoint_and_sorted(union)
    assert intervals.length(union) == len(points(pairs))


def test_union_joins_what_touches() -> None:
    starts, ends = united([(0, 5), (5, 9), (11, 12)])
    assert (starts.tolist(), ends.tolist()) == ([0, 11], [9, 12])


@given(st.lists(spans, max_size=4))
def test_union_all_covers_what_any_set_covers(sets: list[list[tuple[int, int]]]) -> None:
    union = intervals.union_all([united(pairs) for pairs in sets])
    assert points_of(union) == set().union(*map(points, sets))
    assert disjoint_and_sorted(union)


@given(spans, st.integers(-45, 45), st.integers(-45, 45))
def test_clip_keeps_the_points_between(pairs: list[tuple[int, int]], low: int, high: int) -> None:
    clipped = intervals.clip(united(pairs), low, high)
    assert points_of(clipped) == points(pairs) & set(range(low, high))


@given(spans)
def test_gaps_are_the_points_between_first_and_last_that_nothing_covers(
    pairs: list[tuple[int, int]],
) -> None:
    union = united(pairs)
    between = set(range(min(s for s, _ in pairs), max(e for _, e in pairs))) if pairs else set()
    assert points_of(intervals.gaps(union)) == between - points(pairs)


@given(spans, spans)
def test_subtract_is_set_difference(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    left = intervals.subtract(united(a), united(b))
    assert points_of(left) == points(a) - points(b)
    assert disjoint_and_sorted(left)


@given(spans, spans)
def test_what_a_set_covers_of_intervals_is_counted_for_each(
    a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> None:
    of = united(b)
    asked = [pair for pair in a if pair[0] <= pair[1]]
    starts, ends = np.array(asked, np.int64).reshape(-1, 2).T
    found = intervals.covered(of, starts, ends).tolist()
    assert found == [len(points(b) & set(range(*pair))) for pair in asked]
    assert intervals.length_outside(united(a), of) == len(points(a) - points(b))


@given(spans, spans)
def test_intersect_is_set_intersection(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    common = intervals.intersect(united(a), united(b))
    assert points_of(common) == points(a) & points(b)
    assert disjoint_and_sorted(common)


@given(spans, st.lists(st.integers(-45, 60), max_size=20))
def test_covers_is_membership(pairs: list[tuple[int, int]], times: list[int]) -> None:
    inside = intervals.covers(united(pairs), np.array(times, np.int64))
    assert inside.tolist() == [time in points(pairs) for time in times]


@given(st.lists(spans, min_size=1, max_size=3))
def test_sweep_says_of_every_segment_which_sets_cover_it(
    sets: list[list[tuple[int, int]]],
) -> None:
    starts, lengths, cover = intervals.sweep([united(pairs) for pairs in sets])
    assert (lengths > 0).all()
    assert (starts[1:] == (starts + lengths)[:-1]).all()  # no point is left out, none is twice
    for row, pairs in zip(cover, sets, strict=True):
        covered = list(zip(starts[row].tolist(), (starts + lengths)[row].tolist(), strict=True))
        assert points(covered) == points(pairs)


@given(spans)
def test_times_of_today_are_exact(pairs: list[tuple[int, int]]) -> None:
    """Nanoseconds since 1970 do not fit into a double; sums must never pass through one."""
    today = 1_763_000_000_000_000_001
    later = [(start + today, end + today) for start, end in pairs]
    union, shifted = united(pairs), united(later)
    assert (shifted[0] - today).tolist() == union[0].tolist()
    assert (shifted[1] - today).tolist() == union[1].tolist()


def test_length_before_a_time_is_exact_however_late_the_clock_is() -> None:
    late = 1_700_000_000_000_000_000  # a float is off by 256 here
    of = (np.array([late + 10, late + 40]), np.array([late + 30, late + 41]))
    times = np.array([late, late + 10, late + 15, late + 35, late + 41, late + 99])
    assert intervals.length_before(of, times).tolist() == [0, 0, 5, 20, 21, 21]
    assert intervals.length_before(intervals.EMPTY, times).tolist() == [0] * 6


# Medians and quantiles are numpy's.

values = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30)


@given(values)
def test_the_median_is_numpys(found: list[float]) -> None:
    assert median(found) == np.median(found)


@given(st.lists(st.integers(-(2**50), 2**50), min_size=1, max_size=30))
def test_the_median_of_whole_numbers_is_numpys(found: list[int]) -> None:
    assert median(np.array(found, np.int64)) == np.median(found)


@given(values, st.floats(0, 1))
def test_a_quantile_is_numpys(found: list[float], share: float) -> None:
    assert quantile(found, share) == pytest.approx(np.quantile(found, share), rel=1e-9, abs=1e-3)


def test_medians_are_those_of_the_columns() -> None:
    table = np.array([[1.0, 9.0], [5.0, 2.0], [3.0, 4.0], [4.0, 0.0]])
    assert medians(table).tolist() == [3.5, 3.0]
    assert medians(list(table[:3])).tolist() == [3.0, 4.0]


# Rows grouped by what they share.

close = st.integers(-1, 6)
far_apart = st.sampled_from([-1, 0, 7, 2**40, 2**62])
scattered = st.integers(0, 900)  # any two such columns have more combinations than rows
rows = st.lists(st.tuples(close, scattered, far_apart, scattered, st.booleans()), max_size=60)
Row = tuple[int, int, int, int, bool]


@given(rows)
def test_groups_are_the_distinct_combinations_in_order(found: list[Row]) -> None:
    columns = [np.array(column) for column in zip(*found, strict=True)] or [np.empty(0, np.int32)]
    first, inverse, count = group(*columns)
    distinct = sorted(set(found))
    assert count == len(distinct)
    assert [found[row] for row in first] == distinct
    assert [distinct[place] for place in inverse] == found


@given(rows.filter(len))
def test_a_group_is_represented_by_its_first_row(found: list[Row]) -> None:
    first, _, _ = group(*(np.array(column) for column in zip(*found, strict=True)))
    assert [found.index(found[row]) for row in first] == first.tolist()


@given(st.lists(st.integers(-(2**60), 2**60) | st.integers(-3, 3)))
def test_distinct_places_and_counts_are_those_of_numpy(values: list[int]) -> None:
    column = np.array(values, np.int64)
    expected, places, counts = np.unique(column, return_inverse=True, return_counts=True)
    assert [part.tolist() for part in distinct_places(column)] == [
        expected.tolist(),
        places.reshape(-1).tolist(),
    ]
    assert [part.tolist() for part in distinct_counts(column)] == [
        expected.tolist(),
        counts.tolist(),
    ]
