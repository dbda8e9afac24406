"""Convolutions of a penalty on gradients, which sum over the samples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from benches import bench_for
from explain.build import AUTOGRAD, MAIN, kernel, op, step, write
from stepscope import read_trace
from stepscope.predict.tensor_cores import find_sample_convolutions
from stepscope.predict.whatifs import predict_change

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.predict.engine import Bench

# 32 images of 64 x 64 pixels, 64 channels to 128; the weight's gradient convolves them with the
# gradient of the result.
LAYER = [[32, 64, 64, 64], [128, 64, 3, 3]]
OVER_SAMPLES = [[64, 32, 64, 64], [128, 32, 64, 64]]
OPTIONS = ["[1, 1]", "[1, 1]", "[1, 1]", "1", "False", "False", "False"]
LAYER_US, SAMPLES_US = 2002.0, 5802.0
# One block of 128 x 128 goes through 32 samples x 64 x 64 points on one of 132 multiprocessors.
INNER = 32 * 64 * 64
TF32_FLOPS, MULTIPROCESSORS = 494.5e12, 132
BLOCK_US = 2 * 128 * 128 * INNER * MULTIPROCESSORS / TF32_FLOPS * 1e6


def bench_of(folder: Path, again: list[list[int]] = OVER_SAMPLES, host_us: float = 20_000) -> Bench:
    """A layer, and a convolution inside its backward; the device needs 7,850 us for both."""
    events: list[dict[str, Any]] = []
    made: dict[str, Any] = {
        "dtypes": ["float"] * 2 + ["ScalarList"] * len(OPTIONS),
        "concrete": ["", "", *OPTIONS],
        "dur": 40,
    }
    name, empty = "aten::cudnn_convolution", [[] for _ in OPTIONS]
    for number in range(3):
        at, begin = host_us * number, max(host_us, 7850.0) * number + 20
        events += step(number, start=at, dur=host_us)
        events += op(name, start=at, shapes=[*LAYER, *empty], sequence=number, **made)
        events += kernel("conv", start=begin, dur=LAYER_US, launched_at=at + 5, grid=[5, 1, 1])
        at += 200
        linked = {"sequence": number, "forward_thread": MAIN, "thread": AUTOGRAD}
        engine = "autograd::engine::evaluate_function: ConvolutionBackwardBackward0"
        events += op(engine, start=at, dur=140, **linked)
        events += op(name, start=at + 10, thread=AUTOGRAD, shapes=[*again, *empty], **made)
        events += kernel(
            "conv",
            start=begin + LAYER_US + 10,
            dur=SAMPLES_US,
            launched_at=at + 15,
            thread=AUTOGRAD,
            grid=[5, 1, 1],
        )
        events += op(
            "torch::autograd::AccumulateGrad", start=at + 190, dur=20, thread=AUTOGRAD,
            shapes=[[128, 64, 3, 3]], dtypes=["float"],
        )  # fmt: skip
    return bench_for(read_trace(write(folder / "made.json", events, device="NVIDIA H200")))


def test_a_filter_that_is_no_parameter_is_a_result(tmp_path: Path) -> None:
    assert find_sample_convolutions(bench_of(tmp_path).context).tolist() == [False, True]
    assert not find_sample_convolutions(bench_of(tmp_path, LAYER).context).any()


def test_it_grows_with_the_samples_though_its_blocks_do_not(tmp_path: Path) -> None:
    """Five blocks of the layer become ten, on 132 multiprocessors: no longer."""
    outcome = predict_change("batch", bench_of(tmp_path).context, "x2")
    layer, samples = (outcome.context.graph.tasks.dur_ns / 1e3).tolist()
    assert (layer, samples) == pytest.approx((LAYER_US, 2 + 2 * (SAMPLES_US - 2)))
    assert outcome.doubt == pytest.approx(0.4 * samples / (layer + samples), rel=0.02)


def test_in_another_dtype_it_takes_between_one_block_at_peak_and_now(tmp_path: Path) -> None:
    bench = bench_of(tmp_path)
    outcome = predict_change("precision", bench.context, "tf32")
    layer, samples = (outcome.context.graph.tasks.dur_ns / 1e3).tolist()
    assert layer < LAYER_US / 5
    assert samples == pytest.approx(math.sqrt(BLOCK_US * SAMPLES_US), rel=0.001)


def test_the_interval_reaches_to_what_it_takes_now(tmp_path: Path) -> None:
    """As far as the step shows it: a host that needs 20 ms hides it."""
    outcome = predict_change("precision", bench_of(tmp_path, host_us=600).context, "tf32")
    layer, samples = (outcome.context.graph.tasks.dur_ns / 1e3).tolist()
    reach = math.log((layer + SAMPLES_US) / (layer + samples)) / 2
    assert outcome.doubt == pytest.approx(reach, rel=0.05)
    assert predict_change("precision", bench_of(tmp_path).context, "tf32").doubt < 0.02
