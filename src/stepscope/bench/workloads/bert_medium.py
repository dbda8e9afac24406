"""BERT medium: masked words, and whether the second sentence follows the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.transformer import EncoderLayer

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace

BEGIN, END, MASK, SPECIAL = 0, 1, 2, 3  # words from SPECIAL on are of the text


class Bert(nn.Module):
    """The encoder and both heads: only the masked places are compared with the vocabulary."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.words = nn.Embedding(config.words, width)
        self.places, self.sentences = nn.Embedding(512, width), nn.Embedding(2, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(config.dropout)
        layers = (EncoderLayer(config, nn.GELU()) for _ in range(config.layers))
        self.layers = nn.Sequential(*layers)
        self.masked = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.word_bias = nn.Parameter(torch.zeros(config.words))
        self.follows = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
        self.apply(_start_small)

    def forward(
        self, ids: torch.Tensor, sentences: torch.Tensor, masked_at: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.words(ids) + self.places(places) + self.sentences(sentences)
        x = self.layers(self.dropout(self.norm(x)))
        masked = x.gather(1, masked_at.unsqueeze(2).expand(-1, -1, x.shape[2]))
        words = functional.linear(self.masked(masked), self.words.weight, self.word_bias)
        return words, self.follows(x[:, 0])


def _start_small(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


class MaskedPairs(NamedTuple):
    """One batch."""

    ids: torch.Tensor
    sentences: torch.Tensor  # 0 or 1 for each place
    masked_at: torch.Tensor  # as many in each pair
    masked_words: torch.Tensor
    follows: torch.Tensor


def make_batch(config: Config, draw: torch.Generator) -> MaskedPairs:
    """A sentence has words of one topic; the sentence that follows has the same topic."""
    pairs, length, half, device = config.batch, config.length, config.length // 2, draw.device

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw, device=device)

    topics = (random(pairs, 2) * config.topics).long()
    follows = (random(pairs) < 0.5).long()
    topics[:, 1] = torch.where(follows == 1, topics[:, 0], topics[:, 1])
    sentences = (torch.arange(length, device=device) >= half).long().expand(pairs, -1)
    a_topic = (config.words - SPECIAL) // config.topics
    rare = (random(pairs, length) ** 4 * a_topic).long()
    ids = SPECIAL + topics.gather(1, sentences) * a_topic + rare
    ids[:, 0], ids[:, half - 1], ids[:, -1] = BEGIN, END, END
    text = (ids >= SPECIAL).float()
    masked_at = (random(pairs, length) * text).topk(config.masked, 1).indices
    masked_words = ids.gather(1, masked_at)
    return MaskedPairs(ids.scatter(1, masked_at, MASK), sentences, masked_at, masked_words, follows)


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(Bert(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.01)
    draw = place.generator()
    batches = [make_batch(config, draw) for _ in range(config.batches)]

    def step(number: int) -> torch.Tensor:
        batch = batches[number % len(batches)]
        words, follows = model(batch.ids, batch.sentences, batch.masked_at)
        loss = functional.cross_entropy(
            words.flatten(0, 1).float(), batch.masked_words.flatten()
        ) + functional.cross_entropy(follows.float(), batch.follows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


MEDIUM = {
    "batch": 256,
    "batches": 8,  # that training goes round
    "length": 128,  # as in nine tenths of the published training
    "masked": 20,
    "words": 30522,
    "topics": 16,
    "width": 512,
    "heads": 8,
    "layers": 8,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "lr": 2e-4,
}
TINY = {
    "batch": 16,
    "length": 32,
    "masked": 5,
    "words": 67,
    "topics": 8,
    "width": 64,
    "heads": 4,
    "layers": 2,
    "attention_dropout": 0.0,
    "lr": 2e-3,
}
WORKLOAD = TrainingWorkload(
    name="bert-medium",
    task="language model",
    source="Turc et al., Well-Read Students Learn Better, 2019 (BERT medium, 41.7 M)",
    samples="sentence pairs",
    sizes={
        "tiny": {**MEDIUM, **TINY},
        "small": {**MEDIUM, "batch": 64},
        "paper": MEDIUM,
    },
    targets={
        "tiny": Target(loss=3.5, steps=60),
        "small": Target(loss=10.0, steps=60),
        "paper": Target(loss=10.0, steps=60),
    },
    build=build,
    tags=frozenset({"attention"}),
)
