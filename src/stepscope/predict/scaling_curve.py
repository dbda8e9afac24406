"""Steps and throughput by number of workers, weak and strong, with a band."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.predict.traced_exchange import find_traced_exchange
from stepscope.records.prediction import ScalingCurve, ScalingPoint, Setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.predict.whatif import Bench

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def curve(bench: Bench, workers: Sequence[int] = WORKERS, *, strong: bool = False) -> ScalingCurve:
    """Steps and throughput by number of workers; what cannot be said is left out, and why."""
    points: list[ScalingPoint] = []
    refused: list[str] = []
    said: tuple[str, ...] = ()
    present = _present(bench)
    for count in sorted(set(workers)):
        setting = Setting(name="workers", value=f"{count}:strong" if strong else str(count))
        trial = bench.begin()
        if count != present:
            trial = bench.change(trial, setting)
        if trial.refused:
            refused.append(trial.refused[-1])
            continue
        found = bench.tell(trial, (setting,))
        told = trial.context.exchange
        ideal = count / present
        points.append(
            ScalingPoint(
                workers=count,
                step_ms=found.predicted_ms,
                low_ms=found.low_ms,
                high_ms=found.high_ms,
                throughput=found.throughput_factor,
                throughput_low=found.throughput_factor * found.predicted_ms / found.high_ms,
                throughput_high=found.throughput_factor * found.predicted_ms / found.low_ms,
                efficiency=found.throughput_factor / ideal,
                comm_ms=told.comm_ns / 1e6 if told else None,
                exposed_ms=told.exposed_ns / 1e6 if told else None,
                straggling=told.straggling if told else 1.0,
                basis=told.basis if told else "measured",
            )
        )
        if told:
            said = trial.assumptions
    return ScalingCurve(
        strong=strong,
        present=present,
        batch=bench.context.batch,
        points=tuple(points),
        assumptions=tuple(said),
        refused=tuple(refused),
    )


def _present(bench: Bench) -> int:
    traced = find_traced_exchange(bench.context, bench.context.graph)
    return traced.ranks if traced else 1
