"""MLP-Mixer: feed-forward layers along the places of an image and across its channels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.resnet50 import make_stripes, train_classifier

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace


class MixerBlock(nn.Module):
    def __init__(self, config: Config, places: int) -> None:
        super().__init__()
        width = config.width
        self.before_places, self.before_channels = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places = feed_forward(places, config.across_places)
        self.channels = feed_forward(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.places(self.before_places(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.before_channels(x))


def feed_forward(width: int, inside: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inside), nn.GELU(), nn.Linear(inside, width))


class Mixer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        places = (config.image // config.patch) ** 2
        self.cut = nn.Conv2d(3, config.width, config.patch, config.patch)
        self.blocks = nn.Sequential(*(MixerBlock(config, places) for _ in range(config.layers)))
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, config.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.cut(images).flatten(2).transpose(1, 2))
        logits: torch.Tensor = self.head(self.norm(x).mean(1))
        return logits


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(Mixer(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.05)
    return train_classifier(model, optimizer, make_stripes(config, place))


MIXER_S16 = {
    "batch": 64,
    "batches": 4,
    "image": 224,
    "patch": 16,
    "classes": 1000,
    "directions": 16,
    "width": 512,
    "across_places": 256,
    "layers": 8,
    "lr": 1e-3,
}
TINY = {"batch": 8, "image": 32, "patch": 8, "classes": 8, "directions": 4, "width": 32}
WORKLOAD = TrainingWorkload(
    name="mlp-mixer",
    task="image classification",
    source="Tolstikhin et al., MLP-Mixer: An all-MLP Architecture for Vision, 2021 (S/16)",
    samples="images",
    sizes={
        "tiny": {**MIXER_S16, **TINY, "across_places": 32, "layers": 2, "lr": 3e-3},
        "small": MIXER_S16,
        "paper": {**MIXER_S16, "batch": 256},
    },
    targets={
        "tiny": Target(loss=1.2, steps=60),
        "small": Target(loss=4.0, steps=60),
        "paper": Target(loss=4.0, steps=60),
    },
    build=build,
    tags=frozenset({"extra"}),
)
