"""Linear attention: running sums of keys times values instead of a softmax over all words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.extra.llama import train_language_model
from stepscope.bench.workloads.gpt2 import make_texts

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace


class LinearAttentionBlock(nn.Module):
    """Inside a chunk every pair of words is looked at; earlier chunks are known by their sums."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.heads, self.chunk = config.width, config.heads, config.chunk
        self.before_attention, self.before_feed = nn.RMSNorm(width), nn.RMSNorm(width)
        self.project, self.join = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length // self.chunk, self.chunk, 4, self.heads, -1)
        parts = self.project(self.before_attention(x)).view(shape)
        query, key, value, gate = parts.permute(3, 0, 4, 1, 2, 5)
        query, key = functional.elu(query) + 1, functional.elu(key) + 1
        scale = 1 / (length * query.shape[-1])
        sums = torch.einsum("bhcik,bhciv->bhckv", key, value)
        earlier = sums.cumsum(2) - sums
        inside = (query @ key.transpose(-1, -2)).tril() @ value
        mixed = (query @ earlier.to(query.dtype) + inside) * scale * gate.sigmoid()
        x = x + self.join(mixed.permute(0, 2, 3, 1, 4).reshape(batch, length, width))
        return x + self.down(functional.relu(self.up(self.before_feed(x))).square())


class LinearAttentionModel(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.words = nn.Embedding(config.words, config.width)
        self.blocks = nn.Sequential(*(LinearAttentionBlock(config) for _ in range(config.layers)))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.words(ids))))
        return logits


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(LinearAttentionModel(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    return train_language_model(model, optimizer, make_texts(config, place))


LINEAR = {
    "batch": 8,
    "batches": 8,
    "length": 1024,
    "chunk": 64,
    "words": 16384,
    "known": 1000,  # words that occur
    "width": 512,
    "heads": 8,
    "layers": 8,
    "lr": 6e-4,
}
TINY = {
    "length": 32,
    "chunk": 8,
    "words": 64,
    "known": 64,
    "width": 64,
    "heads": 4,
    "layers": 2,
    "lr": 3e-3,
}
WORKLOAD = TrainingWorkload(
    name="linear-attention",
    task="language model",
    source="Katharopoulos et al., Transformers are RNNs, 2020",
    samples="texts",
    sizes={
        "tiny": {**LINEAR, **TINY},
        "small": LINEAR,
        "paper": {**LINEAR, "length": 4096, "layers": 16},
    },
    targets={
        "tiny": Target(loss=2.0, steps=60),
        "small": Target(loss=8.0, steps=60),
        "paper": Target(loss=8.0, steps=60),
    },
    build=build,
    tags=frozenset({"attention", "extra"}),
)
