"""Which operators a compiler fuses, and what the loops move: worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stepscope.explain.flops.call import Call
from stepscope.predict.compiled_step import CONVERSION, keeps_channels_last
from stepscope.predict.fused_loops import FusedLoop, Way, describe_call, fuse_loops

ROWS, WIDE = 4096, 1024
N = ROWS * WIDE
FULL = [ROWS, WIDE]


def call(name: str, *arguments: Any) -> Call:
    """Lists are fp32 tensors, pairs a shape and a dtype, texts plain values."""
    shapes, dtypes, concrete = [], [], []
    for argument in arguments:
        shape, dtype, value = argument, "float", ""
        if isinstance(argument, tuple):
            shape, dtype = argument
        elif isinstance(argument, str):
            shape, dtype, value = [], "Scalar", argument
        shapes.append(shape)
        dtypes.append(dtype)
        concrete.append(value)
    return Call(f"aten::{name}", shapes, dtypes, concrete)


def fuse(*calls: Call, backward: bool = False) -> list[FusedLoop]:
    values = [described for one in calls if (described := describe_call(one)) is not None]
    return fuse_loops(values, backward=backward)


PRODUCT = call("mm", FULL, [WIDE, WIDE])


def test_a_chain_between_products_reads_and_writes_once() -> None:
    (loop,) = fuse(PRODUCT, call("mul", FULL, "2"), call("relu", FULL), PRODUCT)
    assert loop.calls == (1, 2)
    assert loop.bytes_moved == 2 * 4 * N
    assert loop.kernels == 1


def test_a_residual_is_written_beside_what_the_product_needs() -> None:
    (loop,) = fuse(
        PRODUCT,
        call("add", FULL, FULL, "1"),
        call("native_layer_norm", FULL, f"[{WIDE}]", [WIDE], [WIDE], "1e-5"),
        PRODUCT,
    )
    # The product's result and the stream in, the norm's result out; the sum only if it is used.
    assert loop.bytes_moved == 3 * 4 * N


def test_the_sum_is_written_when_a_later_loop_reads_it() -> None:
    first, second = fuse(
        PRODUCT,
        call("add", FULL, FULL, "1"),
        call("native_layer_norm", FULL, f"[{WIDE}]", [WIDE], [WIDE], "1e-5"),
        PRODUCT,
        call("add", FULL, FULL, "1"),
        PRODUCT,
    )
    assert first.bytes_moved == 4 * 4 * N
    assert second.bytes_moved == 3 * 4 * N


def test_casts_of_weights_stay_apart() -> None:
    weight, narrow = [WIDE, WIDE], ([WIDE, WIDE], "c10::BFloat16")
    half = (FULL, "c10::BFloat16")
    loops = fuse(
        call("copy_", half, FULL),
        call("copy_", narrow, weight),
        call("mm", half, narrow),
    )
    assert [loop.calls for loop in loops] == [(0,), (1,)]
    assert [loop.bytes_moved for loop in loops] == [6 * N, 6 * WIDE * WIDE]


def test_batch_norm_reads_its_input_twice() -> None:
    plane = [32, 64, 28, 28]
    elements = math.prod(plane)
    (loop,) = fuse(
        call("cudnn_batch_norm", plane, [64], [64], [64], [64], "True", "0.1", "1e-5"),
        call("relu_", plane),
        call("convolution", plane, [64, 64, 1, 1]),
    )
    assert loop.kernels == 3  # sums of parts, their end, and what uses the statistics
    assert loop.bytes_moved == 3 * 4 * elements


def test_a_norm_written_as_operators_is_one_loop() -> None:
    rows = [ROWS, 1]
    (loop,) = fuse(
        PRODUCT,
        call("pow", FULL, "2"),
        call("mean", FULL, "[1]", "True"),
        call("add", rows, "1e-6"),
        call("rsqrt", rows),
        call("mul", FULL, rows),
        PRODUCT,
    )
    assert loop.calls == (1, 2, 3, 4, 5)
    assert loop.kernels == 1


def test_the_cast_of_a_bias_gradient_belongs_to_its_sum() -> None:
    half = (FULL, "c10::BFloat16")
    loops = fuse(
        call("mm", half, ([WIDE, WIDE], "c10::BFloat16")),
        call("sum", half, "[0]", "False"),
        call("copy_", [WIDE], ([WIDE], "c10::BFloat16")),
        backward=True,
    )
    assert [(one.calls, one.kernels) for one in loops] == [((1, 2), 2)]


def test_few_rows_are_summed_by_one_kernel() -> None:
    small = [32, 256]
    for shape, kernels in ((small, 1), (FULL, 2)):
        product = call("mm", shape, [shape[1], shape[1]])
        (loop,) = fuse(product, call("sum", shape, "[0]", "False"), backward=True)
        assert loop.kernels == kernels


def test_backward_of_a_norm_sums_its_weights_gradients_in_kernels_of_their_own() -> None:
    """The gradient for what comes before, sums of parts, and the end of each sum."""
    plane, channels = [32, 64, 28, 28], [64]
    (layer,) = fuse(
        PRODUCT,
        call("native_layer_norm_backward", FULL, FULL, f"[{WIDE}]", [ROWS, 1], [ROWS, 1], [WIDE]),
        PRODUCT,
        backward=True,
    )
    (batch,) = fuse(
        call("cudnn_batch_norm_backward", plane, plane, channels, channels, channels),
        call("convolution", plane, [64, 64, 1, 1]),
        backward=True,
    )
    assert (layer.kernels, batch.kernels) == (3, 4)


def test_a_product_ends_a_loop_only_for_what_waits_for_the_product() -> None:
    """Dropout's mask is used again, after a product has used what dropout left."""
    dropout = call("native_dropout", FULL, "0.1", "True")
    (loop,) = fuse(PRODUCT, dropout, PRODUCT, call("logical_not", (FULL, "bool")))
    assert loop.calls == (1, 3)
    loops = fuse(PRODUCT, dropout, PRODUCT, call("mul", FULL, (FULL, "bool")))
    assert [one.calls for one in loops] == [(1,), (3,)]


def test_a_sum_by_index_takes_rows_where_they_are_looked_up() -> None:
    nodes, edges = [1000, 64], [50_000, 64]
    index = ([50_000], "long int")
    (zeros, loop) = fuse(
        call("fill_", nodes, "0"),
        call("index_select", nodes, "0", index),
        call("scatter_add_", nodes, "0", (edges, "long int"), edges),
        call("mm", nodes, [64, 8]),
    )
    assert zeros.calls == (0,)
    assert loop.calls == (1, 2)
    # Nothing is written for each edge; each is read and added in memory, and the nodes written.
    assert loop.bytes_moved == 2 * 4 * 50_000 * 64 + 4 * 1000 * 64


def test_a_sum_over_rows_needs_a_second_kernel_and_one_over_a_row_does_not() -> None:
    over_rows, over_row = (
        fuse(PRODUCT, call("relu", FULL), call("sum", FULL, dims, "False"))[0]
        for dims in ("[0]", "[1]")
    )
    assert over_rows.calls == over_row.calls == (1, 2)
    assert over_rows.kernels == 2
    assert over_row.kernels == 1
    # Nobody else needs what is summed up, so both read their input once.
    assert over_rows.bytes_moved == over_row.bytes_moved == 4 * N
    assert (over_rows.sums_bytes, over_row.sums_bytes) == (4 * N, 0)


def test_zeros_that_a_loop_overwrites_disappear_and_those_to_scatter_into_stay() -> None:
    zeros = call("fill_", FULL, "0")
    (gone,) = fuse(zeros, backward=True)
    assert (gone.kernels, gone.bytes_moved) == (0, 0)
    scatter = call("embedding_dense_backward", FULL, ([ROWS], "long int"), "1000", "-1", "False")
    (kept,) = fuse(zeros, scatter, backward=True)
    assert (kept.kernels, kept.bytes_moved) == (1, 4 * N)


def test_what_forward_kept_is_read_in_backward() -> None:
    (loop,) = fuse(
        PRODUCT,
        call("threshold_backward", FULL, FULL, "0"),
        call("mul", FULL, FULL),
        PRODUCT,
        backward=True,
    )
    # The gradient, what relu kept, what the product of elements kept; one gradient out.
    assert loop.bytes_moved == 4 * 4 * N


def test_what_a_relu_kept_is_read_besides_what_the_norm_before_it_kept() -> None:
    norm = call("native_batch_norm_backward", [64, 32, 8, 8], [64, 32, 8, 8], *([32],) * 5)
    relu = call("threshold_backward", [64, 32, 8, 8], [64, 32, 8, 8], "0")
    size = 4 * 64 * 32 * 8 * 8
    convolution = call("convolution_backward", [64, 32, 8, 8], [64, 32, 8, 8], [32, 32, 3, 3])
    (loop,) = fuse(convolution, relu, norm, convolution, backward=True)
    # Twice the gradient, the relu's result and the norm's input: for the sums, and for the result.
    assert loop.sums_bytes == 3 * size
    assert loop.bytes_moved == 7 * size


def test_a_value_that_was_changed_in_place_is_no_more() -> None:
    """The second residual is what the relu left in the first sum's place."""
    block = (PRODUCT, call("add_", FULL, FULL, "1"), call("relu_", FULL))
    first, second = fuse(*block, *block, PRODUCT)
    assert (first.calls, second.calls) == ((1, 2), (4, 5))
    assert first.bytes_moved == second.bytes_moved == 3 * 4 * N


def test_backward_of_a_gate_multiplies_one_gradient_by_both_factors() -> None:
    by_up, by_gate = call("mul", FULL, FULL), call("mul", FULL, FULL)
    weights, inputs = call("mm", [256, ROWS], FULL), call("mm", FULL, [WIDE, 256])
    silu = call("silu_backward", FULL, FULL)
    (loop,) = fuse(PRODUCT, by_up, by_gate, weights, inputs, silu, weights, inputs, backward=True)
    assert loop.calls == (1, 2, 5)
    # In: the gradient, both factors. Out: the gradients of both.
    assert loop.bytes_moved == 5 * 4 * N


def test_elements_that_are_scattered_in_a_row_are_added_one_by_one() -> None:
    index = (FULL, "long int")
    (in_row,) = fuse(call("scatter_add_", [ROWS, 64], "-1", index, FULL), backward=True)
    assert in_row.added == N
    (whole_rows,) = fuse(call("scatter_add_", [64, WIDE], "0", index, FULL), backward=True)
    assert whole_rows.added == 0
    assert whole_rows.bytes_moved == 3 * 4 * N + 4 * 64 * WIDE


def test_enlarging_a_picture_is_a_loop_and_its_backward_adds_four_times() -> None:
    small, large = [2, 8, 16, 16], [2, 8, 64, 64]
    pixels = 2 * 8 * 64 * 64
    resize = call("upsample_bilinear2d", small, "[64, 64]", "False", "", "")
    (loop,) = fuse(resize, call("relu", large), call("convolution", large, [8, 8, 3, 3]))
    assert loop.calls == (0, 1)
    assert loop.bytes_moved == 4 * pixels
    back = call("upsample_bilinear2d_backward", large, "[64, 64]", "[2, 8, 16, 16]", "False")
    (loop,) = fuse(back, backward=True)
    assert (loop.added, loop.kernels) == (4 * pixels, 5)
    assert loop.bytes_moved == 4 * pixels + 4 * 2 * 8 * 16 * 16


def test_two_branches_become_one_loop() -> None:
    up = call("mm", [ROWS, 256], [256, WIDE])
    (loop,) = fuse(up, call("silu", FULL), up, call("mul", FULL, FULL), call("mm", FULL, [WIDE, 8]))
    assert loop.calls == (1, 3)
    assert loop.bytes_moved == 3 * 4 * N


def test_a_loop_that_a_product_has_used_takes_nothing_that_follows() -> None:
    loops = fuse(call("relu", FULL), PRODUCT, call("relu", FULL), PRODUCT)
    assert [one.calls for one in loops] == [(0,), (2,)]


def test_a_join_has_the_dtype_of_its_parts() -> None:
    half = (FULL, "c10::BFloat16")
    attention = call("_flash_attention_backward", half, half, half, half)
    (loop,) = fuse(attention, call("cat", ([FULL, FULL, FULL], "TensorList"), "0"), backward=True)
    assert loop.bytes_moved == 2 * 3 * 2 * N


@pytest.mark.parametrize("name", ["view", "detach", "transpose"])
def test_views_are_no_work(name: str) -> None:
    assert describe_call(call(name, FULL)) is None


@pytest.mark.parametrize("name", ["index_put_", "index_add_", "sort", "max_pool2d_with_indices"])
def test_what_scatters_or_pools_is_a_loop_of_its_own(name: str) -> None:
    described = describe_call(call(name, FULL))
    assert described is not None
    assert described.way == Way.ALONE


def test_damaged_shapes_fuse_with_nothing() -> None:
    described = describe_call(Call("aten::add", [["?"], 3], ["float"], []))
    assert described is not None
    assert described.way == Way.ALONE


def convolution(*weight: int, channels: int | None = None) -> Call:
    return call("convolution", [8, channels or weight[1], 32, 32], list(weight))


def test_the_compiler_changes_the_layout_of_plain_and_depthwise_convolutions() -> None:
    assert keeps_channels_last([convolution(128, 64, 3, 3)])
    assert keeps_channels_last([convolution(128, 64, 3, 3), convolution(96, 1, 3, 3, channels=96)])


@pytest.mark.parametrize(
    "spoils",
    [convolution(96, 8, 3, 3, channels=96), convolution(64, 128, 3, 3)],
    ids=["grouped", "halves its channels"],
)
def test_one_convolution_can_spoil_it(spoils: Call) -> None:
    assert not keeps_channels_last([convolution(128, 64, 3, 3), spoils])


def test_few_channels_or_few_convolutions_do_not_pay() -> None:
    assert not keeps_channels_last([convolution(64, 64, 3, 3), convolution(64, 3, 3, 3)])
    assert not keeps_channels_last([convolution(128, 64, 3, 3), *[call("relu", FULL)] * 100])
    assert not keeps_channels_last([])


def test_kernels_that_only_change_a_layout_are_known_by_name() -> None:
    assert CONVERSION.search("void cudnn::ops::nchwToNhwcKernel<float, float, float, false>")
    assert not CONVERSION.search("sm80_xmma_fprop_implicit_gemm_tf32f32_nhwckrsc_nhwc")
