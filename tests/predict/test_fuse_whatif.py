"""fuse=B: launches stay, kernels grow once they fill the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import stepscope
from benches import ask, bench_for
from explain.build import kernel, op, step, write
from stepscope import read_trace
from stepscope.predict.declaration import Refused
from stepscope.predict.engine import Bench
from stepscope.predict.whatifs.fuse import HOST_GROWTH, fuse_models
from stepscope.records.prediction import Prediction

STEPS, MULTIPROCESSORS = 3, 132


def made(folder: Path, kernels: list[tuple[float, int]], every_us: float, ranks: int = 1) -> Bench:
    """A step that launches a kernel of so many microseconds and blocks every so often."""
    events: list[dict[str, Any]] = []
    step_us = every_us * (len(kernels) + 2)
    for number in range(STEPS):
        at = number * step_us
        events += step(number, start=at, dur=step_us)
        for dur, blocks in kernels:
            events += op(
                "aten::relu", start=at, dur=every_us - 5, shapes=[[8, 8]], dtypes=["float"]
            )
            events += kernel("k", start=at + 12, dur=dur, launched_at=at + 5, grid=[blocks, 1, 1])
            at += every_us
    path = write(folder / "made.json", events, device="NVIDIA H200")
    return bench_for(replace(read_trace(path), world_size=ranks))


def predict(bench: Bench, models: int) -> Prediction:
    return ask(bench, f"fuse={models}")


def test_a_host_bound_step_of_small_kernels_trains_eight_in_nearly_the_time_of_one(
    tmp_path: Path,
) -> None:
    bench = made(tmp_path, [(4.0, 4)] * 40, every_us=60)
    prediction = predict(bench, 8)
    assert prediction.predicted_ms == pytest.approx(HOST_GROWTH * prediction.baseline_ms, rel=0.02)
    assert prediction.throughput_factor == pytest.approx(8 / HOST_GROWTH, rel=0.02)
    assert prediction.low_ms < prediction.predicted_ms < prediction.high_ms
    assert prediction.high_ms > 1.2 * prediction.predicted_ms
    assert any("CUDA graph" in words for words in prediction.assumptions)


def test_a_kernel_grows_once_it_fills_the_device(tmp_path: Path) -> None:
    """66 blocks fill half of the device, 13,200 a hundred times over. One block on each
    multiprocessor, after a start of 2 us: eight models have 4 waves and a tail of 0.4."""
    bench = made(tmp_path, [(102.0, 66), (102.0, 100 * MULTIPROCESSORS)], every_us=300)
    outcome = fuse_models(bench.context, 8)
    tasks = outcome.context.graph.tasks
    half, full = (tasks.dur_ns[tasks.row >= 0] / 1e3).tolist()[:2]
    assert 102 <= half < 2 + 100 * 4.4
    assert full == pytest.approx(8 * 102, rel=0.04)


def test_a_busy_device_gains_little_and_the_prediction_says_so(tmp_path: Path) -> None:
    bench = made(tmp_path, [(298.0, 100 * MULTIPROCESSORS)] * 60, every_us=300)
    prediction = predict(bench, 8)
    assert prediction.throughput_factor == pytest.approx(1.0, rel=0.1)
    assert any("already busy" in words for words in prediction.assumptions)


def test_where_a_graph_is_as_good_the_prediction_says_so(tmp_path: Path) -> None:
    bench = made(tmp_path, [(4.0, 4)] * 40, every_us=200)
    alone = ask(bench, "cuda-graphs").predicted_ms
    few = predict(bench, 2)
    assert alone < few.predicted_ms / 2
    assert any(
        "as good as training them together, and simpler" in words for words in few.assumptions
    )
    slow_device = made(tmp_path, [(90.0, 4)] * 40, every_us=100)
    assert not any("simpler" in words for words in predict(slow_device, 32).assumptions)


def test_more_models_never_make_a_model_slower(tmp_path: Path) -> None:
    bench = made(tmp_path, [(20.0, 40), (60.0, 400), (5.0, 1)] * 10, every_us=30)
    factors = [predict(bench, models).throughput_factor for models in (2, 4, 8, 16, 32)]
    assert np.all(np.diff(factors) >= -1e-6)
    assert factors[-1] <= 32


def test_what_does_not_fit_says_how_many_do(golden: Path) -> None:
    prediction = stepscope.whatif(golden / "h200-resnet18", "fuse=128")
    assert prediction.peak_bytes == 128 * prediction.baseline_peak_bytes
    (words,) = [words for words in prediction.assumptions if "fit at a time" in words]
    assert "about 4" in words


@pytest.mark.parametrize("value", ["1", "x2", "0", "-3", "2.5", "", "100000"])
def test_values_that_make_no_sense(golden: Path, value: str) -> None:
    with pytest.raises(stepscope.UsageError, match="fuse"):
        stepscope.whatif(golden / "h200-resnet18", f"fuse={value}")


def test_several_ranks_and_cpus_are_refused(golden: Path, tmp_path: Path) -> None:
    job = made(tmp_path, [(4.0, 4)] * 4, every_us=60, ranks=2)
    with pytest.raises(Refused, match="several ranks"):
        fuse_models(job.context, 8)
    cpu = bench_for(read_trace(golden / "cpu_step.json.gz"))
    with pytest.raises(Refused, match="no GPU"):
        fuse_models(cpu.context, 8)
