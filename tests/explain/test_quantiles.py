"""Medians and quantiles are numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.step.statistics import median, medians, quantile

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
