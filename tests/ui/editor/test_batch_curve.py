"""The step at other batch sizes, and the batch for a throughput or a peak."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.errors import NotCapturedError, UsageError
from stepscope.predict.batch_size import weights_share
from stepscope.records.source_lines import BatchPoint
from stepscope.ui.editor.batch_size import batch_curve, batch_for

CPU = Path(__file__).parents[2] / "golden" / "cpu_step.json.gz"


def point(batch: int, ms: float, peak: int | None = None) -> BatchPoint:
    return BatchPoint(
        batch=batch,
        step_ms=ms,
        low_ms=0.9 * ms,
        high_ms=1.1 * ms,
        samples_per_second=1e3 * batch / ms,
        peak_bytes=peak,
        peak_low_bytes=peak,
        peak_high_bytes=peak,
    )


# 10 ms of overhead and 1 ms a sample: 100, 133, 160 samples... per second
CURVE = (point(10, 20, 1000), point(20, 30, 2000), point(40, 50, 4000))


def test_the_batch_for_a_throughput_lies_between_two_points() -> None:
    rate = (CURVE[1].samples_per_second + CURVE[2].samples_per_second) / 2
    answer = batch_for(CURVE, samples_per_second=rate)
    assert answer.batch == 30
    assert answer.step_ms == pytest.approx(40)
    assert answer.peak_bytes == 3000


def test_the_batch_for_a_peak_and_the_ends() -> None:
    assert batch_for(CURVE, peak_bytes=1500).batch == 15
    assert batch_for(CURVE, peak_bytes=10).batch == 10
    assert batch_for(CURVE, peak_bytes=10**9).batch == 40
    assert batch_for(CURVE, samples_per_second=1e9).batch == 40
    flat = (point(10, 20, 500), point(20, 30, 500), point(40, 60, 900))
    assert batch_for(flat, peak_bytes=500).batch == 20  # no more memory, and more samples a second


def test_what_cannot_be_answered_is_said() -> None:
    with pytest.raises(UsageError, match="one of them"):
        batch_for(CURVE)
    with pytest.raises(UsageError, match="no batch size"):
        batch_for((), peak_bytes=1)
    with pytest.raises(NotCapturedError, match="memory was not captured"):
        batch_for((point(1, 1), point(2, 2)), peak_bytes=1)


def test_a_cpu_step_grows_with_its_samples_but_less_than_they_do() -> None:
    points = batch_curve(CPU, (2, 4, 8, 16))
    assert [one.batch for one in points] == [2, 4, 8, 16]
    steps = [one.step_ms for one in points]
    assert steps == sorted(steps)
    rates = [one.samples_per_second for one in points]
    assert rates == sorted(rates)
    assert all(one.low_ms < one.step_ms < one.high_ms for one in points)
    with pytest.raises(UsageError, match="at least one sample"):
        batch_curve(CPU, (0,))


def test_the_default_curve_spans_a_quarter_to_eight_times() -> None:
    assert [one.batch for one in batch_curve(CPU)] == [1, 2, 4, 8, 16, 32]
    assert [one.batch for one in batch_curve(CPU, batch=20)] == [5, 10, 20, 40, 80, 160]


def test_a_step_of_several_batches_counts_the_samples_of_all() -> None:
    (one,), (four,) = (batch_curve(CPU, (8,), batch=4, samples=samples) for samples in (4, 16))
    assert four.samples_per_second == pytest.approx(4 * one.samples_per_second)
    assert one.samples_per_second == pytest.approx(8 / one.step_ms * 1e3)


def test_the_part_of_a_product_that_its_weights_cause() -> None:
    """2 FLOPs a weight and row against 16 FLOPs a byte: 32 rows cost what the weights do."""
    assert weights_share("[[32, 8], [16, 8], [16]]") == pytest.approx(0.5)
    assert weights_share("[[96, 8], [16, 8], [16]]") == pytest.approx(0.25)
    assert weights_share("[[4, 24, 8], [16, 8], [16]]") == pytest.approx(0.25)
    assert weights_share("[[16], [96, 8], [8, 16], [], []]") == pytest.approx(0.25)
    assert weights_share("[[4, 4]]") == 0
