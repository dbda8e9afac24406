"""Predict a recorded step on every GPU of the device table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stepscope.predict.declaration import Refused
from stepscope.predict.other_gpu.gpu import Gpu, gpu_rows, make_gpu
from stepscope.predict.other_gpu.step import check_memory, move_context, source_gpu
from stepscope.records.prediction import GpuComparison, GpuPrediction

if TYPE_CHECKING:
    from stepscope.predict.engine import Bench

_HOUR_S = 3600.0


def table_gpus() -> tuple[Gpu, ...]:
    """The GPUs of the device table, those that people train on today."""
    return tuple(make_gpu(row) for row in gpu_rows() if row.device)


def compare_gpus(
    bench: Bench, gpus: Sequence[Gpu], prices: Mapping[str, float] | None = None
) -> GpuComparison:
    """Raises Refused if the step's own GPU is not known."""
    context = bench.context
    source = source_gpu(context)
    rows = [_predict_on_gpu(bench, gpu, (prices or {}).get(gpu.name)) for gpu in gpus]
    own = check_memory(context, source)
    return GpuComparison(
        source=context.trace.device_name or source.name,
        source_gpu=source.name,
        batch=context.batch,
        baseline_ms=bench.mean_ns / 1e6,
        peak_bytes=own.peak_bytes,
        gpus=tuple(sorted(rows, key=lambda row: (row.step_ms is None, row.step_ms or 0.0))),
    )


def _predict_on_gpu(bench: Bench, gpu: Gpu, price: float | None) -> GpuPrediction:
    context = bench.context
    memory = check_memory(context, gpu)
    try:
        moved = move_context(context, gpu)
    except Refused as reason:
        return GpuPrediction(
            gpu=gpu.name,
            step_ms=None,
            fits=memory.fits,
            memory_bytes=gpu.memory_bytes,
            price=price,
            why=str(reason).removeprefix("gpu: "),
        )
    step_ms, low_ms, high_ms = bench.interval_ms(moved.context, moved.doubt)
    samples = context.samples / step_ms * 1e3 if context.samples else None
    per_second = samples if samples is not None else 1e3 / step_ms
    return GpuPrediction(
        gpu=gpu.name,
        step_ms=step_ms,
        low_ms=low_ms,
        high_ms=high_ms,
        speedup=bench.mean_ns / 1e6 / step_ms,
        samples_per_s=samples,
        decides="host" if moved.decides == "host" else "device",
        device_ms=moved.context.graph.device_ns / 1e6,
        host_ms=moved.context.graph.host_ns / 1e6,
        modelled_share=moved.modelled_share,
        fits=memory.fits,
        memory_bytes=gpu.memory_bytes,
        largest_batch=memory.batch,
        price=price,
        samples_per_money=per_second * _HOUR_S / price if price else None,
        why="" if math.isfinite(step_ms) else "no step",
    )
