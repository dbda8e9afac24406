"""Models that others wrote, with their own code: fused as alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from twins import seeded, step, step_alone

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
    return [step_alone(optimizer, model(input_ids=ids, labels=ids).loss).item() for ids in texts]


@pytest.mark.parametrize("build", [bert, llama])
def test_library_model(build: Callable[[], Any]) -> None:
    models = seeded(lambda: build().train())
    twins = copy.deepcopy(models)
    texts = list(torch.randint(200, (4, 4, 16)))
    own = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    array = fuse(models, own, seeds=[7, 8, 9])
    fused = [step(array, array(input_ids=ids, labels=ids).loss).tolist() for ids in texts]
    for place, twin in enumerate(twins):
        alone = losses_alone(twin, 7 + place, texts)
        assert [row[place] for row in fused] == pytest.approx(alone, rel=1e-5)
    assert array.report()["one_by_one"] == {}
    assert "one by one" not in array.report()["functions"]
