"""Steps and throughput by number of workers, weak and strong, with a band."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.predict.traced_exchange import find_traced_exchange
from stepscope.records.prediction import ScalingCurve, ScalingPoint, Setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.predict.whatif import Bench

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def curve(bench: Bench, workers: Sequence[int] = WORKERS, *, strong: bool = False) -> ScalingCurve:
    """Steps and throughput by number of workers; what cannot be predicted is left out, with why."""
    points: list[ScalingPoint] = []
    refused: list[str] = []
    assumptions: tuple[str, ...] = ()
    present = _present_workers(bench)
    for count in sorted(set(workers)):
        setting = Setting(name="workers", value=f"{count}:strong" if strong else str(count))
        trial = bench.begin()
        if count != present:
            trial = bench.change(trial, setting)
        if trial.refused:
            refused.append(trial.refused[-1])
            continue
        prediction = bench.conclude(trial, (setting,))
        throughput = prediction.throughput_factor
        exchange = trial.context.exchange
        points.append(
            ScalingPoint(
                workers=count,
                step_ms=prediction.predicted_ms,
                low_ms=prediction.low_ms,
                high_ms=prediction.high_ms,
                throughput=throughput,
                throughput_low=throughput * prediction.predicted_ms / prediction.high_ms,
                throughput_high=throughput * prediction.predicted_ms / prediction.low_ms,
                efficiency=throughput * present / count,
                comm_ms=exchange.comm_ns / 1e6 if exchange else None,
                exposed_ms=exchange.exposed_ns / 1e6 if exchange else None,
                straggling=exchange.straggling if exchange else 1.0,
                basis=exchange.basis if exchange else "measured",
            )
        )
        if exchange:
            assumptions = trial.assumptions
    alone = next((point.throughput for point in points if point.workers == 1), 1.0 / present)
    points = [
        replace(point, efficiency=point.throughput / point.workers / alone) for point in points
    ]
    return ScalingCurve(
        strong=strong,
        present=present,
        batch=bench.context.batch,
        points=tuple(points),
        assumptions=assumptions,
        refused=tuple(refused),
    )


def _present_workers(bench: Bench) -> int:
    traced = find_traced_exchange(bench.context, bench.context.graph)
    return traced.ranks if traced else 1
