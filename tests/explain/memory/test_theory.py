"""Arithmetic that a hand can check."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stepscope.explain.memory.model import (
    MIXED_ADAM,
    RANKS,
    VOLUME,
    Transformer,
    bytes_per_parameter,
    formula_words,
    make_theory,
    token_bytes,
    transformer_activations,
    zero_bytes,
    zero_table,
)

GPT2 = Transformer(
    layers=12,
    width=768,
    heads=12,
    key_heads=12,
    head_width=64,
    length=1024,
    batch=8,
    feedforward=3072,
    gated=False,
    vocabulary=50304,
    compute_bytes=4,
    residual_bytes=4,
    fused_attention=True,
)


@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 1024])
def test_mixed_precision_adam_takes_16_then_less_by_stage(ranks):
    assert bytes_per_parameter(0, ranks) == 16
    assert bytes_per_parameter(1, ranks) == 4 + 12 / ranks
    assert bytes_per_parameter(2, ranks) == 2 + 14 / ranks
    assert bytes_per_parameter(3, ranks) == 16 / ranks


def test_the_zero_papers_own_example_comes_out():
    """7.5 billion parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB."""
    many = 7_500_000_000
    sizes = dict(zip(("parameters", "gradients", "optimizer"), MIXED_ADAM, strict=True))
    whole = {name: size * many for name, size in sizes.items()}
    found = [zero_bytes(stage, 64, **whole) / 1e9 for stage in range(4)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.88], abs=0.05)


def test_traffic_is_one_one_one_and_a_half():
    assert VOLUME == (1.0, 1.0, 1.0, 1.5)
    table = zero_table(parameters=100, gradients=100, optimizer=200)
    assert {row.volume for row in table if row.stage == 3} == {1.5}
    assert sorted({row.ranks for row in table}) == list(RANKS) == [2**n for n in range(11)]


@given(
    sizes=st.tuples(*[st.integers(0, 10**12)] * 3),
    ranks=st.sampled_from(RANKS),
)
def test_every_stage_holds_no_more_than_the_one_before(sizes, ranks):
    whole = dict(zip(("parameters", "gradients", "optimizer"), sizes, strict=True))
    found = [zero_bytes(stage, ranks, **whole) for stage in range(4)]
    assert found == sorted(found, reverse=True)
    assert found[0] == sum(sizes)
    assert sum(sizes) <= found[3] * ranks < sum(sizes) + 3 * ranks


def test_what_is_already_sharded_is_put_together_again():
    theory = make_theory((10, 10, 20), sharding=(3, 4), activations=None)
    assert (theory.parameters_bytes, theory.gradients_bytes, theory.optimizer_bytes) == (40, 40, 80)
    assert theory.zero[0].size_bytes == 160
    assert "already sharded over 4 ranks" in theory.notes[0]
    second = make_theory((40, 10, 20), sharding=(2, 4), activations=None)
    assert second.zero[0].size_bytes == 160


def test_gpt2_in_fp32_keeps_16_widths_a_token_and_block():
    """8 of width 768 (two norms in and out, q, k, v, attention) and 2 of 3072, a log-sum a head;
    the last norm in and out, and fp32 log-probabilities."""
    block = 4 * (8 * 768 + 2 * 3072) + 4 * 12
    assert block == 4 * 16 * 768 + 48
    assert token_bytes(GPT2) == 12 * block + 4 * 2 * 768 + 4 * 50304 == 797_760


def test_stored_scores_grow_with_the_square_of_the_length():
    plain = replace(GPT2, fused_attention=False)
    assert token_bytes(plain) - token_bytes(GPT2) == 12 * 12 * (1024 * 4 - 4)


def test_autocast_keeps_the_residual_in_fp32_and_the_casts_once():
    cast = 247_302_144  # two bytes for each of 123,651,072 weights and biases of linear layers
    model = replace(GPT2, compute_bytes=2, cast_bytes=cast)
    block = 2 * 4 * 768 + 2 * (6 * 768 + 2 * 3072) + 48
    head = (4 + 2) * 768 + (4 + 2) * 50304
    assert token_bytes(model) == 12 * block + head
    found = transformer_activations(model, None)
    assert found.per_sample_bytes == 1024 * (12 * block + head)
    assert found.total_bytes == 8 * found.per_sample_bytes + cast == 5_480_220_672
    assert "cast weights" in found.formula


def test_shared_keys_and_gated_feed_forwards_count():
    model = replace(GPT2, key_heads=4, gated=True)
    difference = token_bytes(model) - token_bytes(GPT2)
    assert difference == 12 * 4 * (-2 * 8 * 64 + 2 * 3072)
    assert "4f" in formula_words(model)
    assert "k=4" in formula_words(model)
