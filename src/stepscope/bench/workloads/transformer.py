"""The Transformer's base model: translation with encoder and decoder, norms after each part."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.nmt_lstm import make_pairs, shift

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace


class MultiHeadAttention(nn.Module):
    """Queries from one sequence, keys and values from the same or another one."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.join = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, seen: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(x), self.key(seen), self.value(seen))
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=causal
        )
        return self.join(mixed.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """Attention and a feed-forward layer; each is added to its input, then the norm follows."""

    def __init__(self, config: Config, activation: nn.Module) -> None:
        super().__init__()
        width, inner = config.width, 4 * config.width
        self.attention = MultiHeadAttention(width, config.heads, config.attention_dropout)
        self.feed = nn.Sequential(nn.Linear(width, inner), activation, nn.Linear(inner, width))
        self.after_attention, self.after_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
        mixed = self.attention(x, x if seen is None else seen)
        x = self.after_attention(x + self.dropout(mixed))
        return self.after_feed(x + self.dropout(self.feed(x)))


class DecoderLayer(nn.Module):
    """Attends to the words before; then, as an encoder's layer, to the source."""

    def __init__(self, config: Config, activation: nn.Module) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(config.width, config.heads, config.attention_dropout)
        self.after_attention = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.to_source = EncoderLayer(config, activation)

    def forward(self, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        x = self.after_attention(x + self.dropout(self.attention(x, x, causal=True)))
        return self.to_source(x, source)


class TranslationTransformer(nn.Module):
    """One table of words for source, target and output."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.words = nn.Embedding(config.words, config.width)
        layers = range(config.layers)
        self.encoder = nn.ModuleList(EncoderLayer(config, nn.ReLU()) for _ in layers)
        self.decoder = nn.ModuleList(DecoderLayer(config, nn.ReLU()) for _ in layers)
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("waves", waves(config.length, config.width))
        nn.init.normal_(self.words.weight, std=config.width**-0.5)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x, y = self.embed(source), self.embed(target)
        for layer in self.encoder:
            x = layer(x)
        for layer in self.decoder:
            y = layer(y, x)
        return functional.linear(y, self.words.weight)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.words(ids) * self.words.embedding_dim**0.5
        return self.dropout(words + self.waves[: ids.shape[1]])


def waves(length: int, width: int) -> torch.Tensor:
    """Where a word stands: sines and cosines from fast to slow."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
    angles = torch.arange(length)[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), 2).flatten(1)


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(TranslationTransformer(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr, betas=(0.9, 0.98), eps=1e-9)
    pairs = make_pairs(config, place)

    def step(number: int) -> torch.Tensor:
        source, target = pairs[number % len(pairs)]
        logits = model(source, shift(target)).flatten(0, 1).float()
        loss = functional.cross_entropy(logits, target.flatten(), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


BASE = {
    "batch": 784,  # 25 000 words of source and of target
    "batches": 4,  # that training goes round
    "length": 32,
    "words": 37000,
    "known": 1000,
    "width": 512,
    "heads": 8,
    "layers": 6,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "lr": 2e-4,
}
TINY = {
    "batch": 32,
    "length": 8,
    "words": 32,
    "known": 32,
    "width": 64,
    "heads": 4,
    "layers": 2,
    "lr": 3e-3,
}
WORKLOAD = TrainingWorkload(
    name="transformer",
    task="translation",
    source="Vaswani et al., Attention Is All You Need, 2017 (base model)",
    samples="sentences",
    sizes={
        "tiny": {**BASE, **TINY},
        "small": {**BASE, "batch": 128},
        "paper": BASE,
    },
    targets={
        "tiny": Target(loss=1.5, steps=60),
        "small": Target(loss=9.0, steps=60),
        "paper": Target(loss=9.0, steps=60),
    },
    build=build,
    tags=frozenset({"attention"}),
)
