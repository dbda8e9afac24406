"""Costs of operators that do not run on the CPU, counted by hand from what a GPU's trace has."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.explain.flops.call import MATMUL_LIKE, OTHER, Call, Cost, Unknown, compiled
from stepscope.explain.flops.memory_bound import VIEWS
from stepscope.explain.flops.prices import price_call

BF16, FLOAT, LONG, FP8 = "c10::BFloat16", "float", "long int", "c10::Float8_e4m3fn"


def call(name: str, *arguments: Any) -> Call:
    """Arguments: (dtype, dims) is a tensor, a list of dims a list of tensors, None was not given,
    everything else a plain value."""
    shapes: list[Any] = []
    dtypes, concrete = [], []
    for each in arguments:
        if isinstance(each, tuple):
            dtype, dims = each
            shapes.append(dims)
            dtypes.append(dtype)
            concrete.append("")
        elif isinstance(each, list):
            shapes.append(each)
            dtypes.append("TensorList")
            concrete.append("")
        else:
            shapes.append([])
            dtypes.append("" if each is None else "Scalar")
            concrete.append("" if each is None else str(each))
    return Call(name, shapes, dtypes, concrete)


def cost(name: str, *arguments: Any) -> Cost:
    return price_call(call(name, *arguments))


def test_scaled_products_in_fp8_write_sixteen_bits() -> None:
    found = cost("aten::_scaled_mm", (FP8, [32, 64]), (FP8, [64, 16]), (FLOAT, []), (FLOAT, []))
    assert found.flops == 2 * 32 * 64 * 16
    assert found.moved == 32 * 64 + 64 * 16 + 2 * 32 * 16


def test_int8_products_write_32_bits() -> None:
    found = cost("aten::_int_mm", ("signed char", [32, 64]), ("signed char", [64, 16]))
    assert (found.flops, found.moved) == (2 * 32 * 64 * 16, 32 * 64 + 64 * 16 + 4 * 32 * 16)


@pytest.mark.parametrize(
    ("a", "b", "flops", "written"),
    [
        ([100, 8], [4, 8, 6], 2 * 100 * 8 * 6, 100 * 6),  # groups of rows
        ([4, 10, 8], [8, 60], 2 * 10 * 8 * 60, 10 * 60),  # groups of columns
        ([10, 80], [80, 6], 2 * 10 * 80 * 6, 4 * 10 * 6),  # groups of what is summed
        ([4, 10, 8], [4, 8, 6], 2 * 4 * 10 * 8 * 6, 4 * 10 * 6),
    ],
)
def test_grouped_products_count_every_group_once(
    a: list[int], b: list[int], flops: int, written: int
) -> None:
    found = cost("aten::_grouped_mm", (BF16, a), (BF16, b), ("int", [4]))
    assert found.flops == flops
    read = 2 * (_elements(a) + _elements(b))
    assert found.moved == read + 2 * written


def _elements(dims: list[int]) -> int:
    total = 1
    for size in dims:
        total *= size
    return total


def test_int4_weights_are_as_wide_as_their_scales_say() -> None:
    found = cost(
        "aten::_weight_int4pack_mm",
        (BF16, [3, 64]),
        ("int", [4, 2, 32, 4]),
        32,
        (BF16, [2, 32, 2]),
    )
    assert found.flops == 2 * 3 * 64 * 32


@pytest.mark.parametrize(
    "name",
    [
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_cudnn_attention_forward",
    ],
)
def test_attention_with_fewer_heads_of_keys_and_wider_values(name: str) -> None:
    """Queries: batch 2, heads 8, length 10, deep 16; keys: two heads, length 12; values 32 deep."""
    found = cost(name, (BF16, [2, 8, 10, 16]), (BF16, [2, 2, 12, 16]), (BF16, [2, 2, 12, 32]))
    assert found.flops == 2 * 2 * 8 * 10 * 12 * (16 + 32)
    moved = 2 * (2 * 8 * 10 * 16 + 2 * 2 * 12 * (16 + 32) + 2 * 8 * 10 * 32)
    assert found.moved == moved


@pytest.mark.parametrize(
    "name",
    ["aten::_flash_attention_forward", "flash_attn::_flash_attn_forward", "FlashAttnFunc"],
)
def test_kernels_attention_has_the_sequence_before_the_heads(name: str) -> None:
    found = cost(name, (BF16, [2, 10, 8, 16]), (BF16, [2, 12, 2, 16]), (BF16, [2, 12, 2, 16]))
    assert found.flops == 2 * 2 * 8 * 10 * 12 * (16 + 16)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("aten::_scaled_dot_product_cudnn_attention_backward", [2, 8, 10, 16]),
        ("aten::_flash_attention_backward", [2, 10, 8, 16]),
        ("aten::_efficient_attention_backward", [2, 10, 8, 16]),
        ("flash_attn::_flash_attn_backward", [2, 10, 8, 16]),
        ("xformers_flash::flash_bwd", [2, 10, 8, 16]),
    ],
)
def test_attentions_backward_is_five_products_one_of_them_again(
    name: str, shape: list[int]
) -> None:
    found = cost(name, *[(BF16, shape)] * 6)
    one = 2 * 2 * 8 * 10 * 10 * 16
    assert (found.flops, found.again) == (5 * one, one)


def test_attention_on_packed_sequences_is_unknown() -> None:
    """Their lengths are values, and no trace has values."""
    lengths = ("int", [5])
    packed = [(BF16, [100, 8, 16])] * 3
    assert cost("aten::_flash_attention_forward", *packed, lengths, lengths, 30, 30).flops == -1
    assert cost("flash_attn::_flash_attn_varlen_forward", *packed, lengths, lengths).flops == -1


@pytest.mark.parametrize("listed", [True, False])
def test_cudnns_lstm_by_its_weights_or_by_its_arguments(listed: bool) -> None:
    """Two layers, both directions, 6 wide, 8 hidden: weights shorter than 31 tensors are listed."""
    one = [[32, 6], [32, 8], [32], [32]]
    two = [[32, 16], [32, 8], [32], [32]]
    weights = [*one, *one, *two, *two] if listed else []
    arguments = (2, 8, 0, 2, False, 0.0, True, True, None)
    found = cost(
        "aten::_cudnn_rnn",
        (FLOAT, [5, 3, 6]),
        weights,
        4,
        None,
        (FLOAT, [4, 3, 8]),
        None,
        *arguments,
    )
    forward = 2 * 15 * 2 * (32 * (6 + 8) + 32 * (16 + 8))
    assert found.flops == forward
    back = cost(
        "aten::_cudnn_rnn_backward",
        (FLOAT, [5, 3, 6]),
        weights,
        4,
        (FLOAT, [100]),
        (FLOAT, [4, 3, 8]),
        *[None] * 5,
        *arguments,
    )
    assert back.flops == 2 * forward


@pytest.mark.parametrize(
    ("mask", "weights_used"),
    [
        ("[True, True, True, True]", 2 * (20 + 400)),
        ("[False, False, False, True]", 20 + 2 * 400),
        ("[True, False, False, False]", 20 + 400),
    ],
)
def test_a_recurrent_layer_over_data_needs_no_gradient_of_its_input(
    mask: str, weights_used: int
) -> None:
    """A plain layer, 20 wide, over single numbers."""
    back = cost(
        "aten::_cudnn_rnn_backward",
        (FLOAT, [16, 1000, 1]),
        [[20, 1], [20, 20], [20], [20]],
        4,
        (FLOAT, [460]),
        (FLOAT, [1, 16, 20]),
        *[None] * 5,
        *(1, 20, 0, 1, True, 0.0, True, False, None, None, None, mask),
    )
    assert back.flops == 2 * 16 * 1000 * weights_used


def test_miopens_gru_has_three_gates() -> None:
    found = cost(
        "aten::miopen_rnn",
        (FLOAT, [5, 3, 6]),
        [],
        4,
        (FLOAT, [1, 3, 8]),
        None,
        *(3, 8, 1, False, 0.0, True, False, None),
    )
    assert found.flops == 2 * 15 * 24 * (6 + 8)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aten::cudnn_convolution", ("[1, 1]", "[2, 2]", "[1, 1]", 1, False, False, True)),
        ("aten::miopen_convolution", (None, "[1, 1]", "[2, 2]", "[1, 1]", 1, False, False)),
        ("aten::mkldnn_convolution", (None, "[1, 1]", "[2, 2]", "[1, 1]", 1)),
        ("aten::conv2d", (None, "[2, 2]", "[1, 1]", "[1, 1]", 1)),
        ("aten::_convolution", (None, "[2, 2]", "[1, 1]", "[1, 1]", False, "[0, 0]", 1, False)),
        ("aten::_slow_conv2d_forward", ("[3, 3]", None, "[2, 2]", "[1, 1]")),
        ("aten::cudnn_convolution_relu", (None, "[2, 2]", "[1, 1]", "[1, 1]", 1)),
    ],
)
def test_every_library_orders_a_convolutions_arguments_its_own_way(
    name: str, arguments: tuple[Any, ...]
) -> None:
    """Stride 2, padding 1 on 9 x 9: 5 x 5 points."""
    found = cost(name, (BF16, [2, 3, 9, 9]), (BF16, [4, 3, 3, 3]), *arguments)
    assert found.flops == 2 * 2 * 25 * 4 * 27
    assert found.moved == 2 * (2 * 3 * 81 + 4 * 27 + 2 * 4 * 25)


def test_a_convolution_whose_stride_was_not_recorded_is_unknown() -> None:
    given = Call("aten::cudnn_convolution", [[2, 3, 9, 9], [4, 3, 3, 3]], [BF16, BF16], None)
    assert price_call(given).flops == -1
    assert cost("aten::convolution_backward", (BF16, [2, 4, 5, 5])).flops == -1


@pytest.mark.parametrize("shape", [[], [3], [3, -4], [10**12, 10**12], ["?"], {"a": 1}, None])
def test_damaged_shapes_are_unknown(shape: Any) -> None:
    for name in MATMUL_LIKE:
        assert price_call(Call(name, [shape] * 4, [FLOAT] * 4, ["1"] * 4)).flops >= -1
    for name in OTHER:
        found = price_call(Call(name, [shape] * 4, [FLOAT] * 4, ["1"] * 4))
        assert found.flops == 0
        assert found.moved >= -1


def test_sparse_products_are_unknown() -> None:
    with pytest.raises(Unknown):
        MATMUL_LIKE["aten::_sparse_mm"](call("aten::_sparse_mm"))
    assert cost("aten::_sparse_mm", (FLOAT, [4, 4]), (FLOAT, [4, 4])).flops == -1


def test_no_operator_is_in_two_tables() -> None:
    assert not MATMUL_LIKE.keys() & OTHER.keys()
    assert OTHER.keys() >= VIEWS


def test_fused_adamw_passes_over_seven_lists() -> None:
    shapes = [[5, 3], [7]]
    lists = [shapes] * 4 + [[], [[], []]]
    plain = cost("aten::_fused_adamw_", *lists, 1e-3, 0.9, 0.999, 0.0, 1e-8, False, False)
    assert plain.list_elements == 22 * 7
    amsgrad = cost("aten::_fused_adamw_", *lists, 1e-3, 0.9, 0.999, 0.0, 1e-8, True, False)
    assert amsgrad.list_elements == 22 * 9


@pytest.mark.parametrize(("momentum", "passes"), [("0.9", 5), ("0.", 3)])
def test_fused_sgd_has_state_only_with_momentum(momentum: str, passes: int) -> None:
    lists = [[[5, 3]]] * 3
    assert cost("aten::_fused_sgd_", *lists, 0.0, momentum, 0.1).list_elements == 15 * passes


@pytest.mark.parametrize(
    ("name", "lists", "passes"),
    [
        ("aten::_foreach_mul_", 1, 2),
        ("aten::_foreach_add_", 2, 3),
        ("aten::_foreach_addcdiv_", 3, 4),
        ("aten::_foreach_sqrt", 1, 2),
        ("aten::_foreach_copy_", 2, 2),
        ("aten::_foreach_zero_", 1, 1),
        ("aten::_foreach_norm", 1, 1),
        ("aten::cat", 1, 2),
    ],
)
def test_lists_are_read_and_written(name: str, lists: int, passes: int) -> None:
    assert cost(name, *[[[5, 3], [7]]] * lists, 1).list_elements == 22 * passes
    longer = cost(name, *[[]] * lists, 1)  # more than 30 tensors
    assert (longer.list_elements, longer.list_passes) == (0, passes)


@pytest.mark.parametrize(
    ("name", "flops", "moved"),
    [
        ("triton_poi_fused_gelu_3", 0, 2 * 40 + 4 * 10),
        ("triton_red_fused_native_layer_norm_0", 0, 2 * 40 + 4 * 10),
        ("triton_per_fused_embedding_1", 0, -1),  # reads some rows of a table
        ("triton_red_fused_mm_0", -1, -1),  # a product so small that it became a sum
        ("triton_tem_fused_addmm_relu_4", -1, -1),
        ("triton_tem_fused_flex_attention_0", -1, -1),
    ],
)
def test_kernels_of_torch_compile_say_what_they_are(name: str, flops: int, moved: int) -> None:
    found = compiled(call(name, (BF16, [40]), (FLOAT, [10]), 40))
    assert (found.flops, found.moved) == (flops, moved)
