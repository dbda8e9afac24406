"""What a step is made of, and whether shapes grew by one factor."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.explain.explain_job import explain_job
from stepscope.verify.differences import compare_traits
from stepscope.verify.traits import _dtypes, _optimizer_form, _shapes, batch_growth, common_factor

PRODUCT, GRADIENT = ((8, 16), (16, 32)), ((16, 8), (8, 32))


def test_a_batch_grows_where_one_factor_turns_every_shape_into_another() -> None:
    twice = (((16, 16), (16, 32)), ((16, 16), (16, 32)))
    assert batch_growth((PRODUCT, GRADIENT), twice) == (8, 16)
    assert batch_growth((PRODUCT,), (((12, 16), (16, 32)),)) == (8, 12)


def test_the_batch_is_the_smallest_dimension_that_grows() -> None:
    flat, table = ((4096, 768), (768, 768)), ((50257, 768), (4, 1024))
    grown = (((8192, 768), (768, 768)), ((50257, 768), (8, 1024)))
    assert batch_growth((flat, table), grown) == (4, 8)


def test_other_layers_are_no_growth() -> None:
    assert batch_growth((PRODUCT,), (((16, 16), (16, 96)),)) is None  # 2 and 3 times
    assert batch_growth((PRODUCT,), (((16, 16, 1), (16, 32)),)) is None
    assert batch_growth((PRODUCT,), (PRODUCT,)) is None


def test_micro_batches_do_everything_equally_more_often() -> None:
    assert common_factor({"a": 2.0, "b": 1.0}, {"a": 8.0, "b": 4.0}) == 4
    assert common_factor({"a": 2.0, "b": 1.0}, {"a": 4.0, "b": 1.0}) is None  # more layers
    assert common_factor({"a": 2.0}, {"b": 2.0}) is None
    assert common_factor({}, {}) is None


def test_how_an_optimizer_runs_shows_in_its_operators() -> None:
    assert _optimizer_form(["aten::addcdiv_", "aten::mul_"]) == "loop"
    assert _optimizer_form(["aten::_foreach_norm", "aten::_foreach_mul_"]) == "loop"  # clipping
    assert _optimizer_form(["aten::_foreach_add_", "aten::_foreach_sqrt"]) == "foreach"
    assert _optimizer_form(["aten::_foreach_add_", "aten::_fused_adamw_"]) == "fused"


def test_dtypes_and_shapes_are_read_as_the_profiler_writes_them() -> None:
    assert _dtypes('["float", "c10::BFloat16", "Scalar", "long int"]') == {"fp32", "bf16"}
    assert _dtypes('["c10::Float8_e4m3fn"]') == {"fp8"}
    assert _shapes("[[10], [64, 512], [512, 10], [], []]") == ((10,), (64, 512), (512, 10))
    assert _shapes("[[], []]") is None
    assert _shapes("") is None


# Real traces of one model with one thing changed


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("gpt2s_b8_fp32", "gpt2s_b8_tf32", {"precision": ("fp32", "fp32, tf32")}),
        ("gpt2s_b8_fp32", "gpt2s_b8_bf16", {"precision": ("fp32", "bf16")}),
        ("gpt2s_b8_bf16", "gpt2s_b8_bf16_fused", {"optimizer": ("foreach", "fused")}),
        ("gpt2s_b8_bf16", "gpt2s_b8_bf16_ckpt", {"matmuls per step": ("174", "246")}),
        ("gpt2s_b8_bf16", "gpt2s_b8_bf16_graph", {"CUDA graphs": ("no", "yes")}),
        ("gpt2s_b8_bf16", "gpt2s_b8_bf16_stack", {}),
        ("gpt2s_b4_fp32", "gpt2s_b8_fp32", {"batch": ("4", "8")}),
        ("mlp_b32_fp32_loop", "mlp_b32_fp32_fused", {"optimizer": ("loop", "fused")}),
    ],
)
def test_what_changed_between_real_traces(
    before: str, after: str, changed: dict[str, tuple[str, str]]
) -> None:
    folder = Path(__file__).parents[2].parent / "shared/traces/h200"
    if not folder.is_dir():
        pytest.skip("the shared traces are not beside the repository")
    a, b = (explain_job(folder / f"{name}.json.gz", cache=False) for name in (before, after))
    found = compare_traits(({}, a), ({}, b), (), 1.0).changed
    assert {row.name: (row.a, row.b) for row in found} == changed
