"""DenseNet-121: every layer takes the outputs of all layers before it in its stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.resnet50 import make_stripes, train_classifier

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace


class DenseStage(nn.Module):
    """Each layer adds `growth` channels to those it takes."""

    def __init__(self, inputs: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                *narrowed(inputs + number * growth, 4 * growth, 1),
                *narrowed(4 * growth, growth, 3),
            )
            for number in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [x]
        for layer in self.layers:
            outputs.append(layer(torch.cat(outputs, 1)))
        return torch.cat(outputs, 1)


def narrowed(inputs: int, outputs: int, size: int) -> tuple[nn.Module, ...]:
    """A convolution after its norm."""
    layer = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
    return nn.BatchNorm2d(inputs), nn.ReLU(), layer


class DenseNet(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = 2 * config.growth
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        ]
        for stage, count in enumerate(int(count) for count in config.blocks.split(",")):
            if stage:
                layers += [*narrowed(width, width // 2, 1), nn.AvgPool2d(2)]
                width //= 2
            layers.append(DenseStage(width, config.growth, count))
            width += count * config.growth
        self.layers = nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(width, config.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(images).mean((2, 3)))
        return logits


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(DenseNet(config))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9, weight_decay=1e-4)
    return train_classifier(model, optimizer, make_stripes(config, place))


DENSENET121 = {
    "batch": 32,
    "batches": 4,
    "image": 224,
    "classes": 1000,
    "directions": 16,
    "growth": 32,
    "blocks": "6,12,24,16",
    "lr": 0.05,
}
TINY = {"batch": 8, "image": 32, "classes": 8, "directions": 4, "growth": 8, "blocks": "2,2"}
WORKLOAD = TrainingWorkload(
    name="densenet121",
    task="image classification",
    source="Huang et al., Densely Connected Convolutional Networks, 2017",
    samples="images",
    sizes={
        "tiny": {**DENSENET121, **TINY},
        "small": DENSENET121,
        "paper": {**DENSENET121, "batch": 256, "lr": 0.1},
    },
    targets={
        "tiny": Target(loss=1.0, steps=60),
        "small": Target(loss=4.0, steps=60),
        "paper": Target(loss=4.0, steps=60),
    },
    build=build,
    tags=frozenset({"convolutional", "extra"}),
)
