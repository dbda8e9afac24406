"""ResNet-50: which way noisy stripes run. The 3x3 convolutions have the stride, as in v1.5."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace

WAVELENGTH = 16  # pixels from stripe to stripe
NOISE = 0.5
SHIFT = math.pi / 2  # of the phase, at most


class ResNetBottleneck(nn.Module):
    """Narrow, convolve, widen; the input is added to the result."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(),
            *convolution(width, width, 3, stride),
            nn.ReLU(),
            *convolution(width, 4 * width, 1),
        )
        same = inputs == 4 * width and stride == 1
        shortcut = () if same else convolution(inputs, 4 * width, 1, stride)
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.path(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Four stages of bottlenecks: each halves the image (but the first) and doubles the width."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.stem = nn.Sequential(
            *convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
        )
        inputs, blocks = width, []
        for stage, count in enumerate(int(count) for count in config.blocks.split(",")):
            for number in range(count):
                stride = 2 if stage and number == 0 else 1
                blocks.append(ResNetBottleneck(inputs, width << stage, stride))
                inputs = 4 * width << stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, config.classes)
        initialize_convolutions(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return x


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, ...]:
    """Followed by its norm."""
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return layer, nn.BatchNorm2d(outputs)


def initialize_convolutions(model: nn.Module) -> None:
    """He et al., 2015: the variance stays the same from layer to layer."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def make_stripes(config: Config, place: TrainingPlace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Images and labels: the label is the direction of the stripes, their phase varies."""
    draw, device, batch, edge = place.generator(), place.device, config.batch, config.image
    pixels = torch.arange(edge, device=device) * (2 * math.pi / WAVELENGTH)
    batches = []
    for _ in range(config.batches):
        labels = torch.randint(config.directions, (batch,), generator=draw, device=device)
        angles = (labels * (math.pi / config.directions)).view(-1, 1, 1)
        phases = SHIFT * torch.rand((batch, 1, 1), generator=draw, device=device)
        waves = torch.sin(angles.cos() * pixels + angles.sin() * pixels[:, None] + phases)
        noise = torch.randn((batch, 3, edge, edge), generator=draw, device=device)
        batches.append((waves[:, None] + NOISE * noise, labels))
    return batches


def train_classifier(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
) -> Step:
    def step(number: int) -> torch.Tensor:
        images, labels = batches[number % len(batches)]
        loss = functional.cross_entropy(model(images).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(ResNet(config))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9, weight_decay=1e-4)
    return train_classifier(model, optimizer, make_stripes(config, place))


RESNET50 = {
    "batch": 64,
    "batches": 4,
    "image": 224,
    "classes": 1000,  # of which the first `directions` occur
    "directions": 16,
    "width": 64,
    "blocks": "3,4,6,3",
    "lr": 0.05,
}
TINY = {
    "batch": 16,
    "image": 32,
    "classes": 16,
    "directions": 8,
    "width": 8,
    "blocks": "1,1,1,1",
}
WORKLOAD = TrainingWorkload(
    name="resnet50",
    task="image classification",
    source="He et al., Deep Residual Learning for Image Recognition, 2016",
    samples="images",
    sizes={
        "tiny": {**RESNET50, **TINY},
        "small": RESNET50,
        "paper": {**RESNET50, "batch": 256, "lr": 0.1},
    },
    targets={
        "tiny": Target(loss=1.0, steps=40),
        "small": Target(loss=4.0, steps=60),
        "paper": Target(loss=4.0, steps=60),
    },
    build=build,
    tags=frozenset({"convolutional"}),
)
