"""Models that others wrote, with their own code: fused as alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepscope.fix.fuse import fuse

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = {
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


def llama() -> Any:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, use_cache=False)
    return transformers.LlamaForCausalLM(config)


def losses_alone(model: Any, seed: int, texts: list[torch.Tensor]) -> list[float]:
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for ids in texts:
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("build", [bert, llama])
def test_library_model(build: Callable[[], Any]) -> None:
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(build().train())
    twins = copy.deepcopy(models)
    texts = list(torch.randint(200, (4, 4, 16)))
    own = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    array = fuse(models, own, seeds=[7, 8, 9])
    fused = []
    for ids in texts:
        losses = array(input_ids=ids, labels=ids).loss
        array.zero_grad()
        array.backward(losses)
        array.step()
        fused.append(losses.front().tolist())
    for place, twin in enumerate(twins):
        alone = losses_alone(twin, 7 + place, texts)
        assert [row[place] for row in fused] == pytest.approx(alone, rel=1e-5)
    assert array.report()["one_by_one"] == {}
    assert "one by one" not in array.report()["functions"]
