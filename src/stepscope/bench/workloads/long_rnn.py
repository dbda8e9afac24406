"""A plain recurrent network over a long stream of bits: how often is a bit one?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace

RATES = 10  # classes: bits are one with a chance of 5%, 15% ... 95%


class BitStreamRNN(nn.Module):
    """The last state of the stream gives the class."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.recurrent = nn.RNN(1, width, batch_first=True)
        self.output = nn.Linear(width, RATES)

    def forward(self, bits: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(bits)
        return self.output(states[:, -1])


def make_streams(config: Config, place: TrainingPlace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Bits whose rate of ones follows from the class."""
    draw, device = place.generator(), place.device
    streams = []
    for _ in range(config.batches):
        classes = torch.randint(RATES, (config.batch,), generator=draw, device=device)
        rates = (0.05 + classes / RATES).view(-1, 1, 1)
        bits = torch.rand((config.batch, config.length, 1), generator=draw, device=device) < rates
        streams.append((bits.float(), classes))
    return streams


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(BitStreamRNN(config.width))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    streams = make_streams(config, place)

    def step(number: int) -> torch.Tensor:
        bits, classes = streams[number % len(streams)]
        loss = functional.cross_entropy(model(bits).float(), classes)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # a long stream's gradient can explode
        optimizer.step()
        return loss

    return step


BPPSA = {
    "batch": 16,
    "batches": 16,  # that training goes round
    "length": 1000,
    "width": 20,
    "lr": 5e-3,
}
WORKLOAD = TrainingWorkload(
    name="long-rnn",
    task="classification of bit streams",
    source="Wang et al., BPPSA: Scaling Back-propagation by Parallel Scan Algorithm, 2020",
    samples="streams",
    sizes={
        "tiny": {**BPPSA, "batch": 64, "length": 64, "lr": 1e-2},
        "small": {**BPPSA, "batch": 256},
        "paper": BPPSA,
    },
    targets={
        "tiny": Target(loss=2.0, steps=60),
        "small": Target(loss=2.1, steps=60),
        "paper": Target(loss=2.1, steps=60),
    },
    build=build,
    tags=frozenset({"recurrent"}),
)
