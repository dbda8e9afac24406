"""WaveNet: the next level of a signal by convolutions that look ever farther back."""

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


class WaveNetLayer(nn.Module):
    """A gated convolution of two moments, `apart` from each other."""

    def __init__(self, width: int, apart: int) -> None:
        super().__init__()
        self.apart = apart
        self.both = nn.Conv1d(width, 2 * width, 2, dilation=apart)
        self.out = nn.Conv1d(width, 2 * width, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        signal, gate = self.both(functional.pad(x, (self.apart, 0))).chunk(2, 1)
        change, skip = self.out(torch.tanh(signal) * torch.sigmoid(gate)).chunk(2, 1)
        return x + change, skip


class WaveNet(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.levels = nn.Embedding(config.words, width)
        self.layers = nn.ModuleList(
            WaveNetLayer(width, 2**power)
            for _ in range(config.stacks)
            for power in range(config.doublings)
        )
        self.head = nn.Sequential(
            nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, config.words, 1)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.levels(ids).transpose(1, 2)
        total = torch.zeros_like(x)
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        logits: torch.Tensor = self.head(total).transpose(1, 2)
        return logits


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(WaveNet(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    return train_language_model(model, optimizer, make_texts(config, place))


WAVENET = {
    "batch": 8,
    "batches": 4,
    "length": 4096,
    "words": 256,  # levels of the signal
    "known": 256,
    "width": 128,
    "stacks": 2,
    "doublings": 9,
    "lr": 1e-3,
}
TINY = {
    "length": 128,
    "words": 32,
    "known": 32,
    "width": 32,
    "stacks": 1,
    "doublings": 4,
    "lr": 5e-3,
}
WORKLOAD = TrainingWorkload(
    name="wavenet",
    task="audio generation",
    source="van den Oord et al., WaveNet: A Generative Model for Raw Audio, 2016",
    samples="clips",
    sizes={
        "tiny": {**WAVENET, **TINY},
        "small": WAVENET,
        "paper": {**WAVENET, "length": 16000, "stacks": 3, "doublings": 10},
    },
    targets={
        "tiny": Target(loss=2.0, steps=60),
        "small": Target(loss=4.0, steps=60),
        "paper": Target(loss=4.5, steps=60),
    },
    build=build,
    tags=frozenset({"convolutional", "extra"}),
)
