"""Formulas find arguments by their place: here each place is held against torch's own schemas."""

from __future__ import annotations

import pytest

from stepscope.explain.flops import memory_bound, products
from stepscope.explain.flops.call import MATMUL_LIKE, OTHER

from .recording import torch

CONVOLUTIONS = [(name, places) for names, places in products._PLACES.items() for name in names]
# Names that older versions of torch record.
OLD = {"aten::_cat"}


def places_of(name: str) -> dict[str, int] | None:
    """Argument name -> place, of the overload that the profiler records; None where there is no
    such operator here."""
    try:
        schemas = torch._C._jit_get_schemas_for_operator(name)
    except RuntimeError:
        return None
    if not schemas:
        return None
    plain = [schema for schema in schemas if schema.overload_name == ""] or schemas
    return {argument.name: place for place, argument in enumerate(plain[0].arguments)}


@pytest.mark.parametrize(("name", "places"), CONVOLUTIONS, ids=[name for name, _ in CONVOLUTIONS])
def test_a_convolutions_arguments_are_where_its_schema_has_them(
    name: str, places: products.Places
) -> None:
    schema = places_of(name)
    if schema is None:
        pytest.skip(f"{name} is not in this build of torch")
    for argument in ("stride", "padding", "dilation", "groups", "output_padding"):
        if argument in schema or getattr(places, argument) is not None:
            assert getattr(places, argument) == schema[argument], argument
    if "bias" in schema:
        assert places.bias == schema["bias"]
    if "transposed" in schema:
        assert places.transposed == schema["transposed"]
    else:
        assert places.transposed is ("transpose" in name)


@pytest.mark.parametrize("name", products.CAUSAL)
def test_the_causal_flag_is_where_the_schema_has_it(name: str) -> None:
    schema = places_of(name)
    assert schema is not None
    flag = "custom_mask_type" if "efficient_attention_forward" in name else "is_causal"
    assert schema[flag] == products.CAUSAL[name]


@pytest.mark.parametrize("name", products._LENGTHS)
def test_lengths_of_packed_sequences_are_where_the_schema_has_them(name: str) -> None:
    schema = places_of(name)
    assert schema is not None
    lengths = schema.get("cum_seq_q", schema.get("cu_seqlens_q"))
    assert products._LENGTHS[name] == lengths


@pytest.mark.parametrize(
    ("name", "argument", "place"),
    [
        ("aten::_cudnn_rnn", "mode", 6),
        ("aten::_cudnn_rnn", "proj_size", 8),
        ("aten::_cudnn_rnn", "num_layers", 9),
        ("aten::_cudnn_rnn", "bidirectional", 13),
        ("aten::_cudnn_rnn_backward", "mode", 10),
        ("aten::_cudnn_rnn_backward", "bidirectional", 17),
        ("aten::_cudnn_rnn_backward", "output_mask", 21),
        ("aten::miopen_rnn", "mode", 5),
        ("aten::miopen_rnn", "num_layers", 7),
        ("aten::miopen_rnn", "bidirectional", 11),
        ("aten::miopen_rnn_backward", "mode", 10),
        ("aten::miopen_rnn_backward", "bidirectional", 16),
        ("aten::miopen_rnn_backward", "output_mask", 20),
        ("aten::mkldnn_rnn_layer", "weight0", 1),
        ("aten::mkldnn_rnn_layer_backward", "weight1", 1),
        ("aten::convolution_backward", "transposed", 7),
        ("aten::convolution_backward", "output_mask", 10),
        ("aten::convolution_backward_overrideable", "transposed", 6),
        ("aten::convolution_backward_overrideable", "output_mask", 9),
        ("aten::_fused_adamw_", "amsgrad", memory_bound._AMSGRAD),
        ("aten::_fused_adam_", "amsgrad", memory_bound._AMSGRAD),
        ("aten::_fused_sgd_", "momentum", memory_bound._MOMENTUM),
        ("aten::_grouped_mm", "offs", 2),
        ("aten::_scaled_grouped_mm", "offs", 4),
        ("aten::_weight_int4pack_mm", "qScaleAndZeros", 3),
        ("aten::addmm", "mat1", 1),
        ("aten::baddbmm", "batch1", 1),
        ("aten::addbmm", "batch1", 1),
        ("aten::addmv", "mat", 1),
        ("aten::_to_copy", "dtype", 1),
        ("aten::embedding_dense_backward", "num_weights", 2),
        ("aten::max_pool2d_with_indices", "dilation", 4),
        ("aten::max_pool2d_with_indices", "ceil_mode", 5),
        ("aten::avg_pool2d", "ceil_mode", 4),
        ("aten::linalg_vector_norm", "dim", 2),
        ("aten::native_layer_norm", "normalized_shape", 1),
        ("aten::_fused_rms_norm", "normalized_shape", 1),
        ("aten::nll_loss_backward", "target", 2),
        ("aten::binary_cross_entropy_with_logits", "reduction", 4),
        ("aten::binary_cross_entropy", "reduction", 3),
        ("aten::conv_tbc", "pad", 3),
    ],
)
def test_other_places_are_those_of_the_schema(name: str, argument: str, place: int) -> None:
    schema = places_of(name)
    if schema is None:
        pytest.skip(f"{name} is not in this build of torch")
    assert schema[argument] == place


def test_every_aten_operator_of_the_tables_exists() -> None:
    """A name with a typing error would never be met. In-place forms are made up for all alike."""
    names = {name for name in (*MATMUL_LIKE, *OTHER) if name.startswith("aten::")}
    missing = {name for name in names if not torch._C._jit_get_schemas_for_operator(name)}
    assert {name for name in missing if name.removesuffix("_") not in names - {name}} == OLD
