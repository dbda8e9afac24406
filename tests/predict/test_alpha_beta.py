"""Sweeps made from known latencies and rates: the fit finds them again, never less than zero."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.predict.collective_times import (
    evaluate,
    fit_segments,
    fit_sweep,
    held_out_errors,
    noise_floor,
)
from stepscope.records.hardware import CollectiveFit

SIZES = [1 << power for power in range(10, 29)]  # 1 KiB to 256 MiB


def line(alpha_us: float, gb_s: float, sizes: list[int] = SIZES) -> np.ndarray:
    return alpha_us * 1e3 + np.array(sizes) / gb_s


def passes(
    times: np.ndarray, *, noise: float = 0.0, count: int = 8, calls: int = 5, seed: int = 0
) -> list[list[list[float]]]:
    """Every pass is off as a whole at each size; the calls inside it hardly differ."""
    random = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        own = times * np.exp(noise * random.standard_normal(len(times)))
        out.append([[float(t)] * calls for t in own])
    return out


def fit(times: np.ndarray, sizes: list[int] = SIZES, **how: float) -> CollectiveFit:
    return fit_sweep(
        kind="all_reduce",
        group="world",
        group_size=2,
        sizes_bytes=sizes,
        passes_ns=passes(times, **how),  # type: ignore[arg-type]
    )


def test_one_exact_line_is_found_exactly() -> None:
    found = fit(line(50, 4.0))
    (segment,) = found.segments
    assert segment.alpha_ns == pytest.approx(50_000)
    assert segment.beta_ns_per_byte == pytest.approx(0.25)
    assert found.noise == 0
    assert found.held_out == pytest.approx(0, abs=1e-9)
    assert found.latency_ns == segment.alpha_ns


def test_latency_and_rate_survive_noise() -> None:
    found = fit(line(50, 4.0), noise=0.05, count=12)
    assert found.latency_ns == pytest.approx(50_000, rel=0.05)
    assert found.expected_ns(256 << 20) == pytest.approx(line(50, 4.0)[-1], rel=0.05)
    assert 0.02 < found.noise < 0.06  # half of a normal's values lie within 0.67 sigma
    assert found.held_out < 1.5 * found.noise


def test_a_protocol_switch_becomes_a_second_segment() -> None:
    sizes = np.array(SIZES)
    times = np.where(sizes <= 1 << 18, line(20, 1.0), line(200, 10.0))
    found = fit(times, noise=0.01)
    assert len(found.segments) == 2
    first, second = found.segments
    assert first.to_bytes == second.from_bytes
    assert 1 << 18 < first.to_bytes < 1 << 19
    assert (first.alpha_ns, second.alpha_ns) == pytest.approx((20_000, 200_000), rel=0.03)
    assert (first.beta_ns_per_byte, second.beta_ns_per_byte) == pytest.approx((1, 0.1), rel=0.03)


def test_three_regimes_become_three_segments() -> None:
    sizes = np.array(SIZES)
    times = np.select(
        [sizes <= 1 << 15, sizes <= 1 << 22], [line(10, 0.5), line(60, 2.0)], line(600, 8.0)
    )
    assert len(fit(times, noise=0.01).segments) == 3


def test_one_line_is_not_cut_into_segments_by_noise() -> None:
    for seed in range(5):
        assert len(fit(line(80, 3.0), noise=0.08, count=5, seed=seed).segments) == 1


def test_plain_least_squares_fails_where_relative_error_does_not() -> None:
    """The rate falls once messages leave the caches: a plain line then starts below zero."""
    sizes = np.array(SIZES, dtype=float)
    times = np.where(sizes <= 32 << 20, line(60, 4.0), line(60, 4.0) + (sizes - (32 << 20)) / 2)
    beta, alpha = np.polyfit(sizes, times, 1)
    plain = np.median(np.abs(alpha + beta * sizes - times) / times)
    assert alpha < -200_000
    assert plain > 1
    found = fit(times)
    ours = np.median(np.abs(evaluate(found.segments, sizes) - times) / times)
    assert found.latency_ns == pytest.approx(60_000, rel=0.05)
    assert ours < 0.05


def test_times_that_grow_faster_than_bytes_have_no_negative_latency() -> None:
    times = 1e-4 * np.array(SIZES, dtype=float) ** 1.3
    found = fit(times)
    assert all(s.alpha_ns >= 0 and s.beta_ns_per_byte >= 0 for s in found.segments)


def test_expected_time_outside_the_measured_sizes() -> None:
    sizes = np.array(SIZES)
    found = fit(np.where(sizes <= 1 << 18, line(20, 1.0), line(200, 10.0)))
    assert found.expected_ns(0) == found.segments[0].alpha_ns
    step = found.expected_ns(2 << 30) - found.expected_ns(1 << 30)
    assert step == pytest.approx((1 << 30) * found.segments[-1].beta_ns_per_byte)


def test_noise_floor_is_what_a_pass_is_off_the_others() -> None:
    medians = np.array([[100.0, 1000.0], [110.0, 1000.0], [100.0, 1000.0]])
    # by pass and size: |105-100|/100, 0; |100-110|/110, 0; |105-100|/100, 0
    assert noise_floor(medians) == pytest.approx(0.025)


def test_held_out_error_counts_a_pass_the_fit_has_not_seen() -> None:
    times = line(50, 4.0)
    medians = np.array([times, times, times * 1.1])
    (error, *_) = held_out_errors(np.array(SIZES, dtype=float), medians)
    # Two passes of three are predicted from a median 5% too high, the third is 10% above it.
    assert error == pytest.approx(0.05, rel=1e-3)


def test_few_sizes_give_one_segment() -> None:
    for count in (2, 3, 5):
        found = fit(line(10, 1.0, SIZES[:count]), SIZES[:count])
        assert len(found.segments) == 1
        assert found.latency_ns == pytest.approx(10_000, rel=1e-3)


@given(
    alpha_us=st.floats(0.5, 5000),
    gb_s=st.floats(0.05, 500),
    noise=st.floats(0, 0.2),
    seed=st.integers(0, 1000),
    first=st.integers(0, 5),
    count=st.integers(4, 14),
)
@settings(max_examples=25)
def test_every_fit_is_positive_ordered_and_covers_all_sizes(
    alpha_us: float, gb_s: float, noise: float, seed: int, first: int, count: int
) -> None:
    sizes = SIZES[first : first + count]
    found = fit(line(alpha_us, gb_s, sizes), sizes, noise=noise, count=4, seed=seed)
    assert all(s.alpha_ns >= 0 and s.beta_ns_per_byte >= 0 for s in found.segments)
    assert (found.segments[0].from_bytes, found.segments[-1].to_bytes) == (sizes[0], sizes[-1])
    for before, after in zip(found.segments, found.segments[1:], strict=False):
        assert before.to_bytes == after.from_bytes
    assert all(found.expected_ns(size) > 0 for size in sizes)
    assert [m.size_bytes for m in found.measured] == sizes
    assert all(m.low_ns <= m.time_ns <= m.high_ns for m in found.measured)


@given(alpha_us=st.floats(1, 1000), gb_s=st.floats(0.1, 300))
@settings(max_examples=25)
def test_exact_lines_come_back(alpha_us: float, gb_s: float) -> None:
    times = line(alpha_us, gb_s)
    (segment,) = fit_segments(np.array(SIZES, dtype=float), times, 1)
    predicted = evaluate((segment,), np.array(SIZES, dtype=float))
    assert predicted == pytest.approx(times, rel=1e-6)
