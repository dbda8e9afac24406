"""VGG-16: which way noisy stripes run; no norms, and most parameters in three linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.resnet50 import (
    initialize_convolutions,
    make_stripes,
    train_classifier,
)

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace

STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))  # times the width, how many convolutions


class VGG(nn.Module):
    """Five stages of 3x3 convolutions, each ends with a pool that halves the image."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        inputs, layers = 3, []
        for times, count in STAGES:
            for _ in range(count):
                outputs = times * config.width
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        pixels = (config.image // 2 ** len(STAGES)) ** 2
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(inputs * pixels, config.hidden),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.hidden, config.hidden),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.hidden, config.classes),
        )
        initialize_convolutions(self)
        for layer in self.head:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.head(self.features(images))
        return x


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(VGG(config))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9, weight_decay=5e-4)
    return train_classifier(model, optimizer, make_stripes(config, place))


VGG16 = {
    "batch": 64,
    "batches": 4,
    "image": 224,
    "classes": 1000,  # of which the first `directions` occur
    "directions": 16,
    "width": 64,
    "hidden": 4096,
    "dropout": 0.5,
    "lr": 0.002,
}
TINY = {
    "batch": 16,
    "image": 32,
    "classes": 16,
    "directions": 4,
    "width": 4,
    "hidden": 128,
    "dropout": 0.1,
    "lr": 0.004,
}
WORKLOAD = TrainingWorkload(
    name="vgg16",
    task="image classification",
    source="Simonyan and Zisserman, Very Deep Convolutional Networks, 2015 (configuration D)",
    samples="images",
    sizes={
        "tiny": {**VGG16, **TINY},
        "small": VGG16,
        "paper": {**VGG16, "batch": 256},
    },
    targets={
        "tiny": Target(loss=1.0, steps=60),
        "small": Target(loss=6.2, steps=60),
        "paper": Target(loss=6.2, steps=60),
    },
    build=build,
    tags=frozenset({"convolutional"}),
)
