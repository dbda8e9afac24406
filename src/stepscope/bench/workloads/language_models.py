"""Models that predict the next word: GPT-2, a mixture of experts, Llama, linear attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Config, Target, TrainingWorkload
from stepscope.bench.workloads.building_blocks import (
    attend,
    feed_forward,
    in_batches,
    in_sizes,
    train_on,
    words_loss,
)

# GPT-2 small: the next word of texts in which every word follows from the one before.

ADAMW = partial(torch.optim.AdamW, weight_decay=0.1)


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, width: int, heads: int, feed: nn.Module | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = feed or feed_forward(width, 4 * width, nn.GELU(approximate="tanh"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attend(x)
        return x + self.feed(self.before_feed(x))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(self.before_attention(x)).unflatten(2, (3, self.heads, -1))
        return x + self.join(attend(*parts.permute(2, 0, 3, 1, 4), is_causal=True))


class GPT2(nn.Module):
    """The output layer shares its weights with the embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.words = nn.Embedding(config.words, config.width)
        self.places = nn.Embedding(config.length, config.width)
        self.blocks = self.make_blocks(config)
        self.norm = nn.LayerNorm(config.width)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def make_blocks(self, config: Config) -> nn.Module:
        return nn.Sequential(*(Block(config.width, config.heads) for _ in range(config.layers)))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.words(ids)
        return x + self.places(torch.arange(ids.shape[1], device=ids.device))

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.norm(x), self.words.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.score(self.blocks(self.embed(ids)))


@in_batches
def make_texts(config: Config, draw: torch.Generator) -> Iterator[torch.Tensor]:
    """Word n + 1 is word n times three plus one, or a random one in one place out of ten.

    Texts use `known` words of the vocabulary: a model sees that in a few steps.
    """
    shape = (config.batch, config.length + 1)
    while True:
        ids = torch.randint(config.known, shape, generator=draw, device=draw.device)
        follows = torch.rand(shape, generator=draw, device=draw.device) < 0.9
        for place in range(1, config.length + 1):
            following = (3 * ids[:, place - 1] + 1) % config.known
            ids[:, place] = torch.where(follows[:, place], following, ids[:, place])
        yield ids


def next_word_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Predict each word from those before it."""
    return words_loss(model(ids[:, :-1]), ids[:, 1:])


GPT2_SMALL = {
    "batch": 8, "batches": 8, "length": 512, "words": 50257, "known": 1000, "width": 768,
    "heads": 12, "layers": 12, "lr": 6e-4,
}  # fmt: skip
GPT2_TINY = {
    "length": 32, "words": 64, "known": 64, "width": 64, "heads": 4, "layers": 2, "lr": 3e-3,
}  # fmt: skip
GPT2_WORKLOAD = TrainingWorkload(
    name="gpt2",
    task="language model",
    source="Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (124 M)",
    samples="texts",
    sizes=in_sizes(GPT2_SMALL, tiny=GPT2_TINY, paper={"batch": 32, "length": 1024}),
    targets={"tiny": Target(2.0, 60), "small": Target(9.0, 60), "paper": Target(9.0, 60)},
    build=train_on(make_texts, GPT2, ADAMW, next_word_loss),
    tags=frozenset({"attention"}),
)


# A mixture of experts: in every second layer each word goes to two of many feed-forward nets.

BALANCE = 0.01  # weight of the loss that spreads words over experts


class Experts(nn.Module):
    """Each expert takes at most `capacity` words, so that shapes never depend on the data.

    A word that finds its expert full gets nothing from it.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.experts, self.choices = config.width, config.experts, config.choices
        self.room = config.capacity_factor
        self.gate = nn.Linear(width, self.experts, bias=False)
        self.up = nn.Parameter(torch.empty(self.experts, width, 4 * width))
        self.down = nn.Parameter(torch.empty(self.experts, 4 * width, width))
        nn.init.normal_(self.up, std=width**-0.5)
        nn.init.normal_(self.down, std=(4 * width) ** -0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        words = x.flatten(0, 1)
        chances = self.gate(words).float().softmax(1)
        weights, chosen = chances.topk(self.choices, 1)
        capacity = int(self.room * self.choices * len(words) / self.experts) + 1
        slots, first = self.slots(chosen, capacity)
        wasted = self.experts * capacity  # the slot of words that find no room
        taken = words.new_zeros(wasted + 1, words.shape[1])
        taken = taken.index_copy(0, slots, words.repeat(self.choices, 1))
        taken = taken[:wasted].view(self.experts, capacity, -1)
        outputs = torch.bmm(functional.gelu(torch.bmm(taken, self.up)), self.down)
        outputs = functional.pad(outputs.flatten(0, 1), (0, 0, 0, 1))
        parts = outputs.index_select(0, slots).unflatten(0, (self.choices, -1))
        weights = weights / weights.sum(1, keepdim=True)
        out = (parts * weights.t().unsqueeze(2)).sum(0)
        balance = self.experts * (first * chances.mean(0)).sum()
        return out.view_as(x), balance

    def slots(self, chosen: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each choice's slot, all first choices before all second, and experts' shares of
        the first."""
        numbers = torch.arange(self.experts, device=chosen.device)
        wants = chosen.t().flatten() == numbers.unsqueeze(1)
        order = (wants.cumsum(1, dtype=torch.int32) * wants).sum(0) - 1
        slots = chosen.t().flatten() * capacity + order
        slots = slots.where(order < capacity, self.experts * capacity)
        return slots, wants[:, : len(chosen)].float().mean(1)


class ExpertBlock(Block):
    """GPT-2's block with experts as its feed-forward layer."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.width, config.heads, Experts(config))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.attend(x)
        out, balance = self.feed(self.before_feed(x))
        return x + out, balance


class MixtureOfExperts(GPT2):
    """Blocks of GPT-2 and blocks with experts in turn."""

    def make_blocks(self, config: Config) -> nn.Module:
        pairs = range(config.layers // 2)
        dense = nn.ModuleList(Block(config.width, config.heads) for _ in pairs)
        return nn.ModuleList((dense, nn.ModuleList(ExpertBlock(config) for _ in pairs)))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, balances = self.embed(ids), []
        for dense, expert in zip(*self.blocks, strict=True):
            x, balance = expert(dense(x))
            balances.append(balance)
        return self.score(x), torch.stack(balances).mean()


def balanced_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits, balance = model(ids[:, :-1])
    return words_loss(logits, ids[:, 1:]) + BALANCE * balance


GLAM = {
    "batch": 8, "batches": 8, "length": 1024, "words": 50257, "known": 1000, "width": 768,
    "heads": 12, "layers": 12, "experts": 64, "choices": 2, "capacity_factor": 1.25, "lr": 6e-4,
}  # fmt: skip
MOE_WORKLOAD = TrainingWorkload(
    name="moe",
    task="language model",
    source="Du et al., GLaM: Efficient Scaling of Language Models, 2021 (0.1B/64E, 1.9 B)",
    samples="texts",
    sizes=in_sizes(GLAM, tiny={**GPT2_TINY, "experts": 4}, small={"length": 512, "experts": 8}),
    targets={"tiny": Target(2.0, 60), "small": Target(9.0, 60), "paper": Target(9.0, 60)},
    build=train_on(make_texts, MixtureOfExperts, ADAMW, balanced_loss),
    tags=frozenset({"attention", "experts"}),
)


# Llama: rotated queries and keys, fewer keys than queries, a gated feed-forward layer.


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
        y = self.before_attention(x)
        query, key_value = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.query(y), self.key_value(y))
        )
        key, value = key_value.chunk(2, 1)
        query, key = (rotate(part, angles).to(value.dtype) for part in (query, key))
        queries_per_key = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(queries_per_key, 1) for part in (key, value))
        x = x + self.join(attend(query, key, value, is_causal=True))
        y = self.before_feed(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn each pair of features by an angle that grows with the position."""
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


LLAMA = {
    "batch": 8, "batches": 8, "length": 512, "words": 16384, "known": 1000, "width": 768,
    "heads": 12, "shared_heads": 4, "layers": 10, "lr": 6e-4,
}  # fmt: skip
LLAMA_2_7B = {
    "batch": 2, "length": 4096, "words": 32000, "width": 4096, "heads": 32, "shared_heads": 8,
    "layers": 32, "lr": 3e-4,
}  # fmt: skip
LLAMA_WORKLOAD = TrainingWorkload(
    name="llama",
    task="language model",
    source="Touvron et al., Llama 2: Open Foundation and Fine-Tuned Chat Models, 2023",
    samples="texts",
    sizes=in_sizes(LLAMA, tiny={**GPT2_TINY, "shared_heads": 2}, paper=LLAMA_2_7B),
    targets={"tiny": Target(2.0, 60), "small": Target(8.0, 60), "paper": Target(9.0, 60)},
    build=train_on(make_texts, Llama, ADAMW, next_word_loss),
    tags=frozenset({"attention", "extra"}),
)


# Linear attention: running sums of keys times values instead of a softmax over all words.


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


def linear_attention_model(config: Config) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(config.words, config.width),
        *(LinearAttentionBlock(config) for _ in range(config.layers)),
        nn.RMSNorm(config.width),
        nn.Linear(config.width, config.words, bias=False),
    )


LINEAR = {
    "batch": 8, "batches": 8, "length": 1024, "chunk": 64, "words": 16384, "known": 1000,
    "width": 512, "heads": 8, "layers": 8, "lr": 6e-4,
}  # fmt: skip
LINEAR_ATTENTION_WORKLOAD = TrainingWorkload(
    name="linear-attention",
    task="language model",
    source="Katharopoulos et al., Transformers are RNNs, 2020",
    samples="texts",
    sizes=in_sizes(LINEAR, tiny={**GPT2_TINY, "chunk": 8}, paper={"length": 4096, "layers": 16}),
    targets={"tiny": Target(2.0, 60), "small": Target(8.0, 60), "paper": Target(8.0, 60)},
    build=train_on(make_texts, linear_attention_model, torch.optim.AdamW, next_word_loss),
    tags=frozenset({"attention", "extra"}),
)
