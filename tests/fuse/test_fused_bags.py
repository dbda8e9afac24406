"""Embeddings and bags of them: one table of all models, as each would compute alone."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn
from twins import assert_same, train_both

from stepscope.errors import UsageError
from stepscope.fix.fuse import fuse

WORDS = 11


class Bags(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.bags, self.rows = nn.EmbeddingBag(WORDS, 6, **settings), nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.rows(self.bags(ids, *others))
        return result


class WeightedBags(Bags):
    def forward(self, ids: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.rows(self.bags(ids, per_sample_weights=others[0]))
        return result


def one_length() -> tuple[torch.Tensor, ...]:
    return (torch.randint(WORDS, (5, 7)),)


def with_offsets() -> tuple[torch.Tensor, ...]:
    return torch.randint(WORDS, (20,)), torch.tensor([0, 3, 3, 9, 20])  # two are empty


def weighted() -> tuple[torch.Tensor, ...]:
    return torch.randint(WORDS, (5, 7)), torch.rand(5, 7)


def check(build: Any, inputs: Any, steps: int = 6, shared: bool = False) -> None:
    trained = train_both(build, inputs, shared=shared, steps=steps)
    assert_same(trained)
    report = trained.array.report()
    assert report["one_by_one"] == {}
    assert set(report["functions"]) <= {"fused", "once"}


@pytest.mark.few(4)
@pytest.mark.parametrize("padding", [None, 3, -2])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode: str, padding: int | None) -> None:
    check(lambda: Bags(mode=mode, padding_idx=padding), one_length, steps=50)
    check(lambda: Bags(mode=mode, padding_idx=padding), with_offsets, shared=True)
    last = {"include_last_offset": True}
    check(lambda: Bags(mode=mode, padding_idx=padding, **last), with_offsets)


def test_weights_of_samples() -> None:
    check(lambda: WeightedBags(mode="sum", padding_idx=3), weighted, steps=50)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_padding_may_differ_from_model_to_model(kind: Any) -> None:
    own = cycle([1, None, 4])
    check(lambda: kind(WORDS, 6, padding_idx=next(own)), one_length)


def test_gradients_by_frequency() -> None:
    check(lambda: nn.Embedding(WORDS, 6, scale_grad_by_freq=True, padding_idx=2), one_length)
    trained = train_both(lambda: Bags(mode="sum", scale_grad_by_freq=True), one_length)
    assert_same(trained)
    assert trained.array.report()["one_by_one_ms"]["functions"]["embedding_bag"] > 0


def test_a_word_that_no_model_has() -> None:
    array = fuse([Bags(mode="sum") for _ in range(2)])
    with pytest.raises(UsageError, match="an embedding of 11 rows was asked for row 11"):
        array(torch.tensor([[1, 11]]))


def test_offsets_that_do_not_begin_at_zero_are_torchs_to_refuse() -> None:
    array = fuse([Bags(mode="sum") for _ in range(2)])
    with pytest.raises(Exception, match=r"offsets\[0\]"):
        array(torch.tensor([1, 2, 3]), torch.tensor([1, 2]))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(kind: Any) -> None:
    models = [kind(WORDS, 6, sparse=True) for _ in range(2)]
    array = fuse(models)
    (ids,) = one_length()
    with torch.no_grad():
        torch.testing.assert_close(array(ids).of(1), models[1](ids))
    with pytest.raises(UsageError, match="sparse=False"):
        array(ids)
