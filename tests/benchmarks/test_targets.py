import math

import pytest

from targets import CACHED, PEAK, Result, geometric_mean


def test_geometric_mean_of_a_ratio_and_its_inverse_is_one():
    assert geometric_mean([8.0, 1 / 8]) == pytest.approx(1)


def test_mean_of_nothing_is_not_a_number_and_meets_no_target():
    assert math.isnan(geometric_mean([]))
    assert not CACHED.met(math.nan)
    assert not PEAK.met(math.nan)


@pytest.mark.parametrize(("value", "met"), [(4.99, False), (5, True), (80, True)])
def test_speed_has_a_lower_limit(value, met):
    assert CACHED.met(value) is met


@pytest.mark.parametrize(("value", "met"), [(0.35, True), (0.7, True), (0.71, False)])
def test_memory_has_an_upper_limit(value, met):
    assert PEAK.met(value) is met


def test_a_missed_target_is_named_in_its_row():
    row = Result(target=PEAK, value=0.9).row()
    assert "peak memory" in row
    assert "<= 0.7" in row
    assert row.endswith("MISSED")
