"""A mixture of experts: in every second layer each word goes to two of many feed-forward nets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.gpt2 import Block, make_texts

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace

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
        made = torch.bmm(functional.gelu(torch.bmm(taken, self.up)), self.down)
        made = functional.pad(made.flatten(0, 1), (0, 0, 0, 1))
        parts = made.index_select(0, slots).unflatten(0, (self.choices, -1))
        weights = weights / weights.sum(1, keepdim=True)
        out = (parts * weights.t().unsqueeze(2)).sum(0)
        balance = self.experts * (first * chances.mean(0)).sum()
        return out.view_as(x), balance

    def slots(self, chosen: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each choice's slot, all first choices before all second; and experts' shares of first."""
        numbers = torch.arange(self.experts, device=chosen.device)
        wants = chosen.t().reshape(-1, 1) == numbers
        order = (wants.int().cumsum(0) * wants).sum(1) - 1
        slots = chosen.t().flatten() * capacity + order
        slots = slots.where(order < capacity, self.experts * capacity)
        return slots, wants[: len(chosen)].float().mean(0)


class ExpertBlock(Block):
    """GPT-2's block with experts as its feed-forward layer."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.width, config.heads, Experts(config))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.attend(x)
        out, balance = self.feed(self.before_feed(x))
        return x + out, balance


class MixtureOfExperts(nn.Module):
    """Blocks of GPT-2 and blocks with experts in turn."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.words = nn.Embedding(config.words, config.width)
        self.places = nn.Embedding(config.length, config.width)
        pairs = range(config.layers // 2)
        self.dense = nn.ModuleList(Block(config.width, config.heads) for _ in pairs)
        self.expert = nn.ModuleList(ExpertBlock(config) for _ in pairs)
        self.norm = nn.LayerNorm(config.width)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        balances = []
        for dense, expert in zip(self.dense, self.expert, strict=True):
            x, balance = expert(dense(x))
            balances.append(balance)
        return functional.linear(self.norm(x), self.words.weight), torch.stack(balances).mean()


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(MixtureOfExperts(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.1)
    texts = make_texts(config, place)

    def step(number: int) -> torch.Tensor:
        ids = texts[number % len(texts)]
        logits, balance = model(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss = loss + BALANCE * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


GLAM = {
    "batch": 8,
    "batches": 8,  # that training goes round
    "length": 1024,
    "words": 50257,
    "known": 1000,
    "width": 768,
    "heads": 12,
    "layers": 12,
    "experts": 64,
    "choices": 2,
    "capacity_factor": 1.25,
    "lr": 6e-4,
}
TINY = {
    "length": 32,
    "words": 64,
    "known": 64,
    "width": 64,
    "heads": 4,
    "layers": 2,
    "experts": 4,
    "lr": 3e-3,
}
WORKLOAD = TrainingWorkload(
    name="moe",
    task="language model",
    source="Du et al., GLaM: Efficient Scaling of Language Models, 2021 (0.1B/64E, 1.9 B)",
    samples="texts",
    sizes={
        "tiny": {**GLAM, **TINY},
        "small": {**GLAM, "length": 512, "experts": 8},
        "paper": GLAM,
    },
    targets={
        "tiny": Target(loss=2.0, steps=60),
        "small": Target(loss=9.0, steps=60),
        "paper": Target(loss=9.0, steps=60),
    },
    build=build,
    tags=frozenset({"attention", "experts"}),
)
