"""The step at other batch sizes, predicted from one run, and the way back for dragging."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from stepscope.errors import NotCapturedError, UsageError
from stepscope.records.line_costs import BatchPoint
from stepscope.records.prediction import Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from stepscope.predict.whatif import Bench
    from stepscope.records.prediction import Prediction
    from stepscope.records.promise import TrackedPromise

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def batch_curve(
    run: Path,
    batches: Iterable[int] | None = None,
    *,
    batch: int | None = None,
    samples: int | None = None,
) -> tuple[BatchPoint, ...]:
    """What-if at each batch size, smallest first; without `batches`, a quarter to eight times.

    `batch` is the measured one, for a run whose trace does not show it; `samples` are those of the
    measured step of one rank, if they are not its batches as the trace shows them. Raises
    NotCapturedError when the batch is not known, or when the step cannot be predicted.
    """
    from stepscope.ui.slowest_bench import open_slowest
    from stepscope.verify.track_record import history

    bench, rank, _ = open_slowest(str(run), cache=True)
    now = batch or measured_batch(bench)
    if now is None:
        raise NotCapturedError(f"{run} does not show its batch size: give it yourself")
    calls = bench.context.calls
    samples = samples or now * ((calls.batches_per_step if calls else None) or 1)
    per_batch = max(1, rank.world_size or 1) * samples / now
    wanted = sorted({max(1, round(now * f)) for f in FACTORS} if batches is None else set(batches))
    if not wanted or wanted[0] < 1:
        raise UsageError("a batch has at least one sample")
    promises = history()
    return tuple(_point(bench, now, one, per_batch, promises) for one in wanted)


def measured_batch(bench: Bench) -> int | None:
    """Of one rank, as its operators or its data show it."""
    memory = bench.context.memory
    largest = memory.largest_batch if memory is not None else None
    return bench.context.batch or (largest.batch if largest is not None else None)


def _point(
    bench: Bench, now: int, batch: int, per_batch: float, promises: Sequence[TrackedPromise]
) -> BatchPoint:
    from stepscope.ui.whatif import adjusted

    if batch == now:
        return _as_point(bench.predict([]), batch, per_batch)
    setting = Setting(name="batch", value=f"x{batch / now:.9f}")
    prediction = bench.predict([setting])
    if not prediction.applied:
        raise NotCapturedError("; ".join(dict.fromkeys(prediction.refused)))
    return _as_point(adjusted(prediction, promises), batch, per_batch)


def _as_point(step: Prediction, batch: int, per_batch: float) -> BatchPoint:
    """`per_batch`: samples of all ranks' step over `batch`."""
    return BatchPoint(
        batch=batch,
        step_ms=step.predicted_ms,
        low_ms=step.low_ms,
        high_ms=step.high_ms,
        samples_per_second=per_batch * batch / step.predicted_ms * 1e3,
        peak_bytes=step.peak_bytes,
        peak_low_bytes=step.peak_low_bytes,
        peak_high_bytes=step.peak_high_bytes,
    )


def batch_for(
    curve: Sequence[BatchPoint],
    *,
    samples_per_second: float | None = None,
    peak_bytes: int | None = None,
) -> BatchPoint:
    """The batch whose predicted throughput or peak comes nearest, between the curve's ends."""
    if not curve:
        raise UsageError("the curve holds no batch size")
    if (samples_per_second is None) == (peak_bytes is None):
        raise UsageError("give samples_per_second or peak_bytes, one of them")
    if samples_per_second is not None:
        return _nearest(curve, lambda point: point.samples_per_second, samples_per_second)
    if any(point.peak_bytes is None for point in curve):
        raise NotCapturedError(
            "the peak at other batch sizes is not known: memory was not captured"
        )
    assert peak_bytes is not None
    return _nearest(curve, lambda point: float(point.peak_bytes or 0), float(peak_bytes))


def _nearest(
    curve: Sequence[BatchPoint], amount: Callable[[BatchPoint], float], wanted: float
) -> BatchPoint:
    """Straight lines join the points; of equally near batches, the smallest."""
    best = min(curve, key=lambda point: (abs(amount(point) - wanted), point.batch))
    for left, right in pairwise(curve):
        low, high = sorted((amount(left), amount(right)))
        if not low <= wanted <= high or low == high:
            continue
        part = (wanted - amount(left)) / (amount(right) - amount(left))
        return between(left, right, round(left.batch + part * (right.batch - left.batch)))
    return best


def between(left: BatchPoint, right: BatchPoint, batch: int) -> BatchPoint:
    """The point at `batch` on the straight line through two others."""
    part = (batch - left.batch) / (right.batch - left.batch)

    def mixed(a: float, b: float) -> float:
        return a + part * (b - a)

    def mixed_bytes(a: int | None, b: int | None) -> int | None:
        return None if a is None or b is None else round(mixed(a, b))

    return BatchPoint(
        batch=batch,
        step_ms=mixed(left.step_ms, right.step_ms),
        low_ms=mixed(left.low_ms, right.low_ms),
        high_ms=mixed(left.high_ms, right.high_ms),
        samples_per_second=mixed(left.samples_per_second, right.samples_per_second),
        peak_bytes=mixed_bytes(left.peak_bytes, right.peak_bytes),
        peak_low_bytes=mixed_bytes(left.peak_low_bytes, right.peak_low_bytes),
        peak_high_bytes=mixed_bytes(left.peak_high_bytes, right.peak_high_bytes),
    )
