"""Depthwise convolutions in bf16: by whose kernels they ran in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from benches import bench_for
from explain.build import kernel, op, step, write
from stepscope import read_trace
from stepscope.predict.whatifs import predict_change

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.predict.declaration import Outcome

IMAGES, FILTERS = [64, 96, 56, 56], [96, 1, 7, 7]
CHANNELS_LAST, CONTIGUOUS = [301056, 1, 5376, 96], [301056, 3136, 56, 1]
OWN = "dgrad2d_c1_k1_nhwc_specialized"
GENERAL = "void cudnn::cnn::wgrad2d_grouped_direct_kernel<false, true, int, float, float, float>"
PYTORCHS = "void at::native::(anonymous namespace)::conv_depthwise2d_grad_weight_kernel<float>"
FLOPS = 2 * 64 * 96 * 56 * 56 * 49  # of one gradient
SHAPES = [IMAGES, IMAGES, FILTERS]
ARGUMENTS = ["", "[1, 1]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "96", "[True, True, False]"]


def in_bf16(folder: Path, name: str, us: float, strides: list[int]) -> Outcome:
    """A product, and the backward of a depthwise convolution with one kernel."""
    events: list[dict[str, Any]] = []
    for number in range(3):
        at = 20_000.0 * number
        events += step(number, start=at, dur=20_000)
        events += op("aten::mm", start=at, dur=40, shapes=[[512, 512]] * 2, dtypes=["float"] * 2)
        events += kernel("gemm", start=at + 20, dur=100, launched_at=at + 5)
        events += op(
            "aten::convolution_backward",
            start=at + 200,
            dur=40,
            shapes=[*SHAPES, *([] for _ in ARGUMENTS)],
            strides=[strides, strides, [49, 49, 7, 1], *([] for _ in ARGUMENTS)],
            dtypes=["float"] * 3 + ["ScalarList"] * len(ARGUMENTS),
            concrete=[""] * 3 + ARGUMENTS,
        )
        events += kernel(name, start=at + 220, dur=us, launched_at=at + 205)
    trace = read_trace(write(folder / "made.json", events, device="NVIDIA H200"))
    return predict_change("precision", bench_for(trace).context, "bf16")


def convolution_us(outcome: Outcome) -> float:
    tasks = outcome.context.graph.tasks
    return float(tasks.dur_ns[tasks.row >= 0][1] / 1e3)


def test_pytorchs_own_kernels_take_as_long_as_before(tmp_path: Path) -> None:
    assert convolution_us(in_bf16(tmp_path, PYTORCHS, 900, CONTIGUOUS)) == pytest.approx(900)


def test_cudnns_kernels_for_them_move_half_the_bytes(tmp_path: Path) -> None:
    """2 us of a kernel are its start."""
    assert convolution_us(in_bf16(tmp_path, OWN, 402, CHANNELS_LAST)) == pytest.approx(202)


def test_a_kernel_for_any_convolution_gives_way_to_one_for_depthwise_ones(tmp_path: Path) -> None:
    """At 6% of fp32's 67 TFLOP/s, behind a start of 2 us; a backward call has two gradients."""
    found = convolution_us(in_bf16(tmp_path, GENERAL, 3880, CHANNELS_LAST))
    assert found == pytest.approx(2 + FLOPS / (0.06 * 67e12) * 1e6, rel=0.05)


def test_only_in_channels_last(tmp_path: Path) -> None:
    assert convolution_us(in_bf16(tmp_path, GENERAL, 3880, CONTIGUOUS)) == pytest.approx(3880)


def test_what_is_not_known_widens_the_interval(tmp_path: Path) -> None:
    known = in_bf16(tmp_path, OWN, 402, CHANNELS_LAST).doubt
    guessed = in_bf16(tmp_path, GENERAL, 3880, CHANNELS_LAST).doubt
    assert known == 0
    assert guessed > 0.1
