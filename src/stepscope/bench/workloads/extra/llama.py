"""Llama: rotated queries and keys, fewer keys than queries, a gated feed-forward layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.gpt2 import make_texts

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace


class LlamaBlock(nn.Module):
    """Attention in which several queries share a key, and a gated feed-forward layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.size = config.width, config.width // config.heads
        self.before_attention, self.before_feed = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * config.shared_heads * self.size, bias=False)
        self.join = nn.Linear(width, width, bias=False)
        wide = width * 8 // 3
        self.gate, self.up = nn.Linear(width, wide, bias=False), nn.Linear(width, wide, bias=False)
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.before_attention(x)
        query = self._heads(self.query(y))
        key, value = self._heads(self.key_value(y)).chunk(2, 1)
        query, key = (rotate(part, angles).to(value.dtype) for part in (query, key))
        queries_per_key = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(queries_per_key, 1) for part in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.before_feed(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Each pair of features by an angle that grows with the position."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Llama(nn.Module):
    angles: torch.Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.words = nn.Embedding(config.words, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.words, bias=False)
        half = config.width // config.heads // 2
        rates = 1e4 ** (-torch.arange(half) / half)
        self.register_buffer("angles", torch.arange(config.length)[:, None] * rates)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, self.angles)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def train_language_model(
    model: nn.Module, optimizer: torch.optim.Optimizer, texts: list[torch.Tensor]
) -> Step:
    """Each word from those before it."""

    def step(number: int) -> torch.Tensor:
        ids = texts[number % len(texts)]
        logits = model(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(Llama(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.1)
    return train_language_model(model, optimizer, make_texts(config, place))


LLAMA = {
    "batch": 8,
    "batches": 8,
    "length": 512,
    "words": 16384,
    "known": 1000,  # words that occur
    "width": 768,
    "heads": 12,
    "shared_heads": 4,
    "layers": 10,
    "lr": 6e-4,
}
TINY = {
    "length": 32,
    "words": 64,
    "known": 64,
    "width": 64,
    "heads": 4,
    "shared_heads": 2,
    "layers": 2,
}
WORKLOAD = TrainingWorkload(
    name="llama",
    task="language model",
    source="Touvron et al., Llama 2: Open Foundation and Fine-Tuned Chat Models, 2023",
    samples="texts",
    sizes={
        "tiny": {**LLAMA, **TINY, "lr": 3e-3},
        "small": LLAMA,
        "paper": {
            **LLAMA,
            "batch": 2,
            "length": 4096,
            "words": 32000,
            "width": 4096,
            "heads": 32,
            "shared_heads": 8,
            "layers": 32,
            "lr": 3e-4,
        },
    },
    targets={
        "tiny": Target(loss=2.0, steps=60),
        "small": Target(loss=8.0, steps=60),
        "paper": Target(loss=9.0, steps=60),
    },
    build=build,
    tags=frozenset({"attention", "extra"}),
)
