"""Rows grouped by what they share."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepscope.step.call_tree import distinct_counts, distinct_places, group

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
