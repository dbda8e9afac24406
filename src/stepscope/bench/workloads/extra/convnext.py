"""ConvNeXt: wide depthwise convolutions, and layers that see one place at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.resnet50 import make_stripes, train_classifier

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace


class ConvNextBlock(nn.Module):
    """A 7x7 convolution of each channel, then a feed-forward layer of each place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        change = self.scale * self.down(functional.gelu(self.up(places)))
        return x + change.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4)]
        for stage, blocks in enumerate(int(count) for count in config.blocks.split(",")):
            if stage:
                layers.append(nn.Conv2d(width, 2 * width, 2, 2))
                width *= 2
            layers += [ConvNextBlock(width) for _ in range(blocks)]
        self.layers = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, config.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.layers(images).mean((2, 3))))
        return logits


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(ConvNext(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.05)
    return train_classifier(model, optimizer, make_stripes(config, place))


CONVNEXT_T = {
    "batch": 32,
    "batches": 4,
    "image": 224,
    "classes": 1000,
    "directions": 16,
    "width": 96,
    "blocks": "3,3,9,3",
    "lr": 1e-3,
}
TINY = {"batch": 8, "image": 32, "classes": 8, "directions": 4, "width": 16, "blocks": "1,1"}
WORKLOAD = TrainingWorkload(
    name="convnext",
    task="image classification",
    source="Liu et al., A ConvNet for the 2020s, 2022 (ConvNeXt-T)",
    samples="images",
    sizes={
        "tiny": {**CONVNEXT_T, **TINY, "lr": 3e-3},
        "small": CONVNEXT_T,
        "paper": {**CONVNEXT_T, "batch": 128},
    },
    targets={
        "tiny": Target(loss=1.2, steps=60),
        "small": Target(loss=4.0, steps=60),
        "paper": Target(loss=4.0, steps=60),
    },
    build=build,
    tags=frozenset({"convolutional", "extra"}),
)
