"""Convolutions in tf32 and bf16, by their shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from benches import bench_for
from explain.build import kernel, op, step, write
from stepscope import read_trace
from stepscope.explain.flops.call import Call
from stepscope.predict.tensor_cores import (
    AskedGradients,
    Convolution,
    Terms,
    amounts,
    convolution_ns,
    dense_convolution,
)
from stepscope.predict.whatifs import predict_change
from stepscope.records.hardware import Ceilings

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.predict.declaration import Outcome

# One FLOP and one byte per ns.
ROUND = Ceilings(
    device="round",
    flops={"tf32": 1e9, "bf16": 1e9},
    bytes_s=1e9,
    flops_source={"tf32": "table", "bf16": "table"},
    bytes_source="table",
    source="made",
)
PLAIN = Convolution(
    batch=2,
    inputs=32,
    outputs=128,
    read_points=64,
    written_points=64,
    filtered_points=64,
    taps=9,
)


def amounts_of(shape: Convolution, gradients: AskedGradients | None = None, **other: str) -> Terms:
    return amounts(shape, other.get("dtype", "tf32"), ROUND, 100, gradients)


def test_a_forward_pass_by_hand() -> None:
    assert amounts_of(PLAIN) == Terms(
        start=1,
        layout_start=1,
        product=2 * (2 * 64) * 128 * (32 * 9),
        weight_product=0,
        wave=2 * 100 * 128 * 128 * (32 * 9),
        moved=4 * 2 * 64 * (32 + 128),
        weights=0,
        input_layout=4 * 2 * 64 * 32,
        output_layout=4 * 2 * 64 * 128,
        strided=0,
    )


def test_a_backward_pass_by_hand() -> None:
    """The input's gradient has 32 columns, filled up to 128; the weight's has 32 channels, filled
    up to 64."""
    assert amounts_of(PLAIN, AskedGradients()) == Terms(
        start=1,
        layout_start=1,
        product=2 * (2 * 64) * 128 * (128 * 9),
        weight_product=2 * (2 * 64) * 128 * (64 * 9),
        wave=2 * 100 * 128 * 128 * (128 * 9),
        moved=4 * 2 * 64 * (32 + 128),
        weights=4 * 32 * 128 * 9,
        input_layout=4 * 2 * 64 * 32,
        output_layout=4 * 2 * 64 * 128,
        strided=0,
    )


@pytest.mark.parametrize(("outputs", "filled"), [(16, 128), (64, 128), (128, 128), (192, 256)])
def test_output_channels_fill_whole_blocks(outputs: int, filled: int) -> None:
    product = amounts_of(replace(PLAIN, outputs=outputs)).product
    assert product == 2 * (2 * 64) * filled * (32 * 9)


@pytest.mark.parametrize(("dtype", "filled"), [("tf32", 16), ("bf16", 32)])
def test_input_channels_are_read_64_bytes_at_a_time(dtype: str, filled: int) -> None:
    product = amounts_of(replace(PLAIN, inputs=3), dtype=dtype).product
    assert product == 2 * (2 * 64) * 128 * (filled * 9)


def test_the_gradient_of_a_first_layers_weight_reads_few_channels() -> None:
    image = replace(PLAIN, inputs=3)
    alone = amounts_of(image, AskedGradients(of_input=False))
    assert alone.weight_product == 2 * (2 * 64) * 128 * (8 * 9)
    assert (alone.product, alone.wave, alone.start) == (0, 0, 0.5)
    assert alone.moved == amounts_of(image, AskedGradients()).moved / 2


def changes_layout(shape: Convolution, dtype: str = "tf32") -> bool:
    return amounts_of(shape, dtype=dtype).layout_start > 0


def square(side: int, taps: int) -> Convolution:
    points = dict.fromkeys(("read_points", "written_points", "filtered_points"), side * side)
    return replace(PLAIN, taps=taps, **points)


def test_layouts_change_around_all_but_plain_products() -> None:
    assert changes_layout(square(28, taps=9))
    assert not changes_layout(replace(square(28, taps=9), channels_last=True))
    assert not changes_layout(square(28, taps=1))
    assert changes_layout(replace(square(28, taps=1), strided=True))
    assert not changes_layout(square(1, taps=1))  # both layouts are the same


def test_a_plain_product_needs_aligned_rows() -> None:
    """Rows of 14 x 14 elements have 784 bytes in tf32 and 392 in bf16: 16 divides only 784."""
    assert not changes_layout(square(14, taps=1), "tf32")
    assert changes_layout(square(14, taps=1), "bf16")
    assert changes_layout(square(17, taps=1), "tf32")


def test_a_stride_costs_a_pass_over_the_larger_tensor() -> None:
    halved = replace(PLAIN, written_points=16, filtered_points=16, strided=True)
    assert amounts_of(halved).strided == 4 * 2 * 64 * 32
    doubled = replace(PLAIN, written_points=256, strided=True)
    assert amounts_of(doubled).strided == 4 * 2 * 256 * 128


def test_a_calibrated_peak_stands_for_a_higher_data_sheet() -> None:
    calibrated = replace(ROUND, flops={"tf32": 0.8e9}, flops_source={"tf32": "calibrated"})
    measured = convolution_ns(PLAIN, "tf32", calibrated, 100)
    assert measured == pytest.approx(convolution_ns(PLAIN, "tf32", ROUND, 100))


def convolution_call(name: str, shapes: list[list[int]], *concrete: str, bias: bool = True) -> Call:
    tensors = ["float"] * len(shapes) + ([""] if bias else [])
    dtypes = [*tensors, *("ScalarList" for _ in concrete)]
    empty: list[list[int]] = [[] for _ in range(len(dtypes) - len(shapes))]
    return Call(name, [*shapes, *empty], dtypes, [*("" for _ in tensors), *concrete])


PLAIN_OPTIONS = ("[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1")


def test_the_shape_of_a_forward_call() -> None:
    call = convolution_call("aten::convolution", [[2, 32, 8, 8], [128, 32, 3, 3]], *PLAIN_OPTIONS)
    assert dense_convolution(call) == PLAIN


def test_the_shape_of_a_backward_call() -> None:
    shapes = [[2, 128, 8, 8], [2, 32, 8, 8], [128, 32, 3, 3]]
    options = (*PLAIN_OPTIONS, "[True, True, False]")
    call = convolution_call("aten::convolution_backward", shapes, *options)
    assert dense_convolution(call) == PLAIN


def test_a_convolution_over_one_dimension() -> None:
    call = convolution_call("aten::conv1d", [[4, 64, 1024], [128, 64, 1]], "[1]", "[0]", "[1]", "1")
    found = dense_convolution(call)
    assert found is not None
    assert (found.inputs, found.outputs, found.taps) == (64, 128, 1)
    assert found.read_points == found.written_points == found.filtered_points == 1024


def test_a_convolution_over_three_dimensions_is_the_same_product() -> None:
    shapes = [[2, 32, 8, 8, 8], [128, 32, 3, 3, 3]]
    call = convolution_call("aten::conv3d", shapes, "[1, 1, 1]", "[1, 1, 1]", "[1, 1, 1]", "1")
    points = {"read_points": 512, "written_points": 512, "filtered_points": 512}
    assert dense_convolution(call) == replace(PLAIN, taps=27, **points)


def test_a_transposed_convolution_filters_the_points_of_its_input() -> None:
    options = ("[2, 2]", "[1, 1]", "[1, 1]", "True", "[0, 0]", "1")
    call = convolution_call("aten::convolution", [[2, 32, 8, 8], [32, 128, 4, 4]], *options)
    found = dense_convolution(call)
    assert found == replace(PLAIN, taps=16, written_points=256, strided=True)
    assert found.flops == 2 * (2 * 64) * 32 * 128 * 16


def test_what_was_not_measured_has_no_shape() -> None:
    """Grouped convolutions, weights without channels, other operators."""
    options = (*PLAIN_OPTIONS[:-1], "4")
    call = convolution_call("aten::convolution", [[2, 32, 8, 8], [128, 8, 3, 3]], *options)
    assert dense_convolution(call) is None
    shapes, options = [[2, 128, 8, 8], [2, 32, 8, 8], [128]], (*PLAIN_OPTIONS, "[True, True]")
    assert (
        dense_convolution(convolution_call("aten::convolution_backward", shapes, *options)) is None
    )
    assert dense_convolution(convolution_call("aten::mm", [[2, 2], [2, 2]], bias=False)) is None


IMAGES, FILTERS = [64, 256, 56, 56], [256, 256, 3, 3]
CONTIGUOUS, CHANNELS_LAST = [802816, 3136, 56, 1], [802816, 1, 14336, 256]


def in_precision(
    folder: Path, value: str, us: float, strides: list[int] | None = None, *, shapes: bool = True
) -> Outcome:
    """A step of one large convolution, recorded on an H200 in fp32."""
    events: list[dict[str, Any]] = []
    described: dict[str, Any] = {}
    if shapes:
        described = {
            "shapes": [IMAGES, FILTERS, [], *([] for _ in PLAIN_OPTIONS)],
            "strides": [strides or CONTIGUOUS, [2304, 9, 3, 1], [], *([] for _ in PLAIN_OPTIONS)],
            "dtypes": ["float", "float", "", *("ScalarList" for _ in PLAIN_OPTIONS)],
            "concrete": ["", "", "", *PLAIN_OPTIONS],
        }
    for number in range(3):
        at = 20_000.0 * number
        events += step(number, start=at, dur=20_000)
        events += op("aten::mm", start=at, dur=40, shapes=[[512, 512]] * 2, dtypes=["float"] * 2)
        events += kernel("gemm", start=at + 20, dur=100, launched_at=at + 5)
        events += op("aten::convolution", start=at + 200, dur=40, **described)
        events += kernel("sgemm_conv", start=at + 220, dur=us, launched_at=at + 205)
    trace = read_trace(write(folder / "made.json", events, device="NVIDIA H200"))
    return predict_change("precision", bench_for(trace).context, value)


def convolution_us(outcome: Outcome) -> float:
    tasks = outcome.context.graph.tasks
    return float(tasks.dur_ns[tasks.row >= 0][1] / 1e3)


@pytest.mark.parametrize(("value", "measured_us"), [("tf32", 792), ("bf16", 476)])
def test_a_convolution_takes_what_its_shape_says(
    tmp_path: Path, value: str, measured_us: float
) -> None:
    """It took 8,584 us in fp32: it gains more than the peak, which is 7.4 times as high in tf32."""
    found = in_precision(tmp_path, value, 8584)
    assert convolution_us(found) == pytest.approx(measured_us, rel=0.2)
    assert (
        "convolutions take as long as cuDNN's of these shapes took on an H200" in found.assumptions
    )


def test_tf32_makes_no_convolution_slower(tmp_path: Path) -> None:
    assert convolution_us(in_precision(tmp_path, "tf32", 300)) == pytest.approx(300)


def test_channels_last_needs_no_change_of_layout(tmp_path: Path) -> None:
    contiguous = convolution_us(in_precision(tmp_path, "bf16", 8584))
    channels_last = convolution_us(in_precision(tmp_path, "bf16", 8584, CHANNELS_LAST))
    assert 0.5 * contiguous < channels_last < contiguous - 15


def test_without_shapes_nothing_is_said_of_a_convolution(tmp_path: Path) -> None:
    found = in_precision(tmp_path, "tf32", 8584, shapes=False)
    assert convolution_us(found) == pytest.approx(8584)
    assert not any("convolutions" in line for line in found.assumptions)


def test_the_interval_knows_how_far_convolutions_are_off(tmp_path: Path) -> None:
    """Of a step that is nearly all one convolution, in place of the spread of other products."""
    found = in_precision(tmp_path, "tf32", 8584)
    assert found.doubt == pytest.approx(0.15, rel=0.1)
    assert found.spread < 0.01
