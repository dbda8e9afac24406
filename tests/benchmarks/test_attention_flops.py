"""Fused attention with fewer heads for keys and values: where torch 2.11's counter fails."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmarks train")

import torch
from torch.nn import functional
from torch.utils import flop_counter

from torchs_flops import count_flops, count_training


@pytest.fixture
def like_torch_2_11(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")

    monkeypatch.setattr(flop_counter, "sdpa_flop_count", refuse)
    monkeypatch.setattr(flop_counter, "sdpa_backward_flop_count", refuse)


@pytest.mark.usefixtures("like_torch_2_11")
def test_a_gpus_fused_operator_with_grouped_heads() -> None:
    query = torch.empty(2, 4, 16, 8, device="meta", dtype=torch.bfloat16)
    key = torch.empty(2, 2, 32, 8, device="meta", dtype=torch.bfloat16)
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    total, again = count_training(lambda: flash(query, key, key))
    assert total == 2 * (2 * 4 * 16 * 32) * (8 + 8)
    assert again == 0


@pytest.mark.usefixtures("like_torch_2_11")
def test_grouped_heads_cost_what_repeated_heads_cost() -> None:
    query = torch.randn(2, 4, 16, 8, requires_grad=True)
    key = torch.randn(2, 2, 16, 8, requires_grad=True)

    def grouped() -> None:
        functional.scaled_dot_product_attention(query, key, key, enable_gqa=True).sum().backward()

    def repeated(_: int) -> None:
        wide = key.repeat_interleave(2, 1)
        functional.scaled_dot_product_attention(query, wide, wide).sum().backward()

    total, again = count_training(grouped)
    product = 2 * 2 * 4 * 16 * 16 * 8
    assert (total, again) == (7 * product, product)
    assert [total - again] == count_flops(repeated, [0])  # by plain products


@pytest.mark.slow
@pytest.mark.usefixtures("like_torch_2_11")
def test_a_small_llama_with_grouped_heads() -> None:
    pytest.importorskip("transformers")
    from compiled_models import llama

    model, batch = llama(tiny=True)
    total, again = count_training(lambda: model(*batch).backward())
    assert again > 0
    assert [total - again] == count_flops(lambda _: model(*batch).backward(), [0])
