"""Swin: attention inside windows of an image, which are shifted in every second block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.resnet50 import make_stripes, train_classifier

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace


class SwinBlock(nn.Module):
    """Attention with a learned bias of places, inside windows."""

    def __init__(self, width: int, side: int, window: int, shift: int) -> None:
        super().__init__()
        self.side, self.window, self.shift = side, window, shift
        self.heads = width // 32
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(self.heads, window**2, window**2))
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, _, width = x.shape
        places = self.before_attention(x).view(batch, self.side, self.side, width)
        windows = self._cut(places.roll((-self.shift, -self.shift), (1, 2)))
        parts = self.project(windows).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2) + self.bias
        mixed = (scores.softmax(-1).to(value.dtype) @ value).transpose(1, 2).flatten(2)
        places = self._paste(self.join(mixed), batch).roll((self.shift, self.shift), (1, 2))
        x = x + places.reshape(batch, -1, width)
        return x + self.feed(self.before_feed(x))

    def _cut(self, x: torch.Tensor) -> torch.Tensor:
        """Places of an image -> windows of it."""
        count, size = self.side // self.window, self.window
        parts = x.view(len(x), count, size, count, size, -1).transpose(2, 3)
        return parts.reshape(-1, size * size, x.shape[-1])

    def _paste(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        count, size = self.side // self.window, self.window
        parts = x.view(batch, count, count, size, size, -1).transpose(2, 3)
        return parts.reshape(batch, self.side, self.side, x.shape[-1])


class MergePlaces(nn.Module):
    """Four neighbours become one place, twice as wide."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.join = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half, (batch, _, width) = self.side // 2, x.shape
        four = x.view(batch, half, 2, half, 2, width).transpose(2, 3)
        merged: torch.Tensor = self.join(four.reshape(batch, half * half, 4 * width))
        return merged


class Swin(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, side, layers = config.width, config.image // 4, []
        self.cut = nn.Conv2d(3, width, 4, 4)
        for stage, blocks in enumerate(int(count) for count in config.blocks.split(",")):
            if stage:
                layers.append(MergePlaces(width, side))
                width, side = 2 * width, side // 2
            for number in range(blocks):
                shift = config.window // 2 if number % 2 and side > config.window else 0
                layers.append(SwinBlock(width, side, config.window, shift))
        self.layers = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, config.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.cut(images).flatten(2).transpose(1, 2))
        logits: torch.Tensor = self.head(self.norm(x).mean(1))
        return logits


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(Swin(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.05)
    return train_classifier(model, optimizer, make_stripes(config, place))


SWIN_T = {
    "batch": 32,
    "batches": 4,
    "image": 224,
    "classes": 1000,
    "directions": 16,
    "width": 96,
    "window": 7,
    "blocks": "2,2,6,2",
    "lr": 1e-3,
}
TINY = {"batch": 8, "image": 32, "classes": 8, "directions": 4, "width": 32, "window": 4}
WORKLOAD = TrainingWorkload(
    name="swin",
    task="image classification",
    source="Liu et al., Swin Transformer, 2021 (Swin-T)",
    samples="images",
    sizes={
        "tiny": {**SWIN_T, **TINY, "blocks": "2,2"},
        "small": SWIN_T,
        "paper": {**SWIN_T, "batch": 128},
    },
    targets={
        "tiny": Target(loss=1.2, steps=60),
        "small": Target(loss=4.0, steps=60),
        "paper": Target(loss=4.0, steps=60),
    },
    build=build,
    tags=frozenset({"attention", "extra"}),
)
