"""GPT-2 small: the next word of texts in which every word follows from the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, width: int, heads: int, feed: nn.Module | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = feed or nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attend(x)
        return x + self.feed(self.before_feed(x))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.project(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.join(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT2(nn.Module):
    """The output layer shares its weights with the embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.words = nn.Embedding(config.words, config.width)
        self.places = nn.Embedding(config.length, config.width)
        blocks = (Block(config.width, config.heads) for _ in range(config.layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(config.width)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.blocks(self.words(ids) + self.places(places)))
        return functional.linear(x, self.words.weight)


def make_texts(config: Config, place: TrainingPlace) -> list[torch.Tensor]:
    """Word n + 1 is word n times three plus one, or a random one in one place out of ten.

    Texts use `known` words of the vocabulary: a model sees that in a few steps.
    """
    draw, shape = place.generator(), (config.batch, config.length + 1)
    texts = []
    for _ in range(config.batches):
        ids = torch.randint(config.known, shape, generator=draw, device=place.device)
        kept = torch.rand(shape, generator=draw, device=place.device) < 0.9
        for at in range(1, config.length + 1):
            ids[:, at] = torch.where(
                kept[:, at], (3 * ids[:, at - 1] + 1) % config.known, ids[:, at]
            )
        texts.append(ids)
    return texts


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(GPT2(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.1)
    texts = make_texts(config, place)

    def step(number: int) -> torch.Tensor:
        ids = texts[number % len(texts)]
        logits = model(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


GPT2_SMALL = {
    "batch": 8,
    "batches": 8,  # that training goes round
    "length": 512,
    "words": 50257,
    "known": 1000,
    "width": 768,
    "heads": 12,
    "layers": 12,
    "lr": 6e-4,
}
TINY = {"length": 32, "words": 64, "known": 64, "width": 64, "heads": 4, "layers": 2, "lr": 3e-3}
WORKLOAD = TrainingWorkload(
    name="gpt2",
    task="language model",
    source="Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (124 M)",
    samples="texts",
    sizes={
        "tiny": {**GPT2_SMALL, **TINY},
        "small": GPT2_SMALL,
        "paper": {**GPT2_SMALL, "batch": 32, "length": 1024},
    },
    targets={
        "tiny": Target(loss=2.0, steps=60),
        "small": Target(loss=9.0, steps=60),
        "paper": Target(loss=9.0, steps=60),
    },
    build=build,
    tags=frozenset({"attention"}),
)
