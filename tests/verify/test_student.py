"""Student's t, against scipy's."""

from __future__ import annotations

import pytest
from scipy import stats

from stepscope.verify.spread import student_quantile


@pytest.mark.parametrize("freedom", [1.0, 2.0, 3.5, 10.0, 200.0])
@pytest.mark.parametrize("level", [0.0025, 0.3, 0.5, 0.8, 0.975])
def test_students_distribution_is_scipys(freedom: float, level: float) -> None:
    expected = stats.t.ppf(level, freedom)
    assert student_quantile(freedom, level) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_many_degrees_of_freedom_are_as_good_as_the_normal_distribution() -> None:
    assert student_quantile(1e9, 0.975) == pytest.approx(1.96, abs=0.006)


def test_less_than_one_degree_of_freedom_is_one() -> None:
    assert student_quantile(0.3, 0.975) == student_quantile(1, 0.975)
