"""Classifiers of images and clips by plain convolutions: ResNet-50, VGG-16, DenseNet-121,
and C3D in space and time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Config, Target, TrainingWorkload
from stepscope.bench.workloads.building_blocks import (
    SGD,
    Labelled,
    Mean,
    convolution,
    in_batches,
    in_sizes,
    initialize_convolutions,
    train_on,
)

# ResNet-50: which way noisy stripes run. The 3x3 convolutions have the stride, as in v1.5.

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


def resnet_stem(width: int) -> nn.Sequential:
    return nn.Sequential(*convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))


def resnet_stages(config: Config) -> Iterator[tuple[list[ResNetBottleneck], int]]:
    """Yield the blocks of each stage, and the channels that come out: each stage halves the image
    (but the first) and doubles the width."""
    inputs = config.width
    for stage, count in enumerate(map(int, config.blocks.split(","))):
        width, blocks = config.width << stage, []
        for number in range(count):
            blocks.append(ResNetBottleneck(inputs, width, 2 if stage and number == 0 else 1))
            inputs = 4 * width
        yield blocks, inputs


class ResNet(nn.Module):
    """Four stages of bottlenecks."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.stem = resnet_stem(config.width)
        stages = list(resnet_stages(config))
        self.blocks = nn.Sequential(*(block for blocks, _ in stages for block in blocks))
        self.head = nn.Linear(stages[-1][1], config.classes)
        initialize_convolutions(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return x


@in_batches
def make_stripes(config: Config, draw: torch.Generator) -> Iterator[Labelled]:
    """Images and labels: the label is the direction of the stripes, their phase varies."""
    device, batch, edge = draw.device, config.batch, config.image
    pixels = torch.arange(edge, device=device) * (2 * math.pi / WAVELENGTH)
    while True:
        labels = torch.randint(config.directions, (batch,), generator=draw, device=device)
        angles = (labels * (math.pi / config.directions)).view(-1, 1, 1)
        phases = SHIFT * torch.rand((batch, 1, 1), generator=draw, device=device)
        waves = torch.sin(angles.cos() * pixels + angles.sin() * pixels[:, None] + phases)
        noise = torch.randn((batch, 3, edge, edge), generator=draw, device=device)
        yield waves[:, None] + NOISE * noise, labels


RESNET50 = {
    "batch": 64, "batches": 4, "image": 224, "classes": 1000, "directions": 16, "width": 64,
    "blocks": "3,4,6,3", "lr": 0.05,
}  # fmt: skip
RESNET50_TINY = {
    "batch": 16, "image": 32, "classes": 16, "directions": 8, "width": 8, "blocks": "1,1,1,1",
}  # fmt: skip
RESNET50_WORKLOAD = TrainingWorkload(
    name="resnet50",
    task="image classification",
    source="He et al., Deep Residual Learning for Image Recognition, 2016",
    samples="images",
    sizes=in_sizes(RESNET50, tiny=RESNET50_TINY, paper={"batch": 256, "lr": 0.1}),
    targets={"tiny": Target(1.0, 40), "small": Target(4.0, 60), "paper": Target(4.0, 60)},
    build=train_on(make_stripes, ResNet, SGD),
    tags=frozenset({"convolutional"}),
)


# VGG-16: which way noisy stripes run; no norms, and most parameters in three linear layers.

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
        pixels, hidden = (config.image // 2 ** len(STAGES)) ** 2, config.hidden
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(inputs * pixels, hidden),
            *(nn.ReLU(), nn.Dropout(config.dropout)),
            nn.Linear(hidden, hidden),
            *(nn.ReLU(), nn.Dropout(config.dropout)),
            nn.Linear(hidden, config.classes),
        )
        initialize_convolutions(self)
        for layer in self.head:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.head(self.features(images))
        return x


VGG16 = {
    "batch": 64, "batches": 4, "image": 224, "classes": 1000, "directions": 16, "width": 64,
    "hidden": 4096, "dropout": 0.5, "lr": 0.002,
}  # fmt: skip
VGG16_TINY = {
    "batch": 16, "image": 32, "classes": 16, "directions": 4, "width": 4, "hidden": 128,
    "dropout": 0.1, "lr": 0.004,
}  # fmt: skip
VGG16_WORKLOAD = TrainingWorkload(
    name="vgg16",
    task="image classification",
    source="Simonyan and Zisserman, Very Deep Convolutional Networks, 2015 (configuration D)",
    samples="images",
    sizes=in_sizes(VGG16, tiny=VGG16_TINY, paper={"batch": 256}),
    targets={"tiny": Target(1.0, 60), "small": Target(6.2, 60), "paper": Target(6.2, 60)},
    build=train_on(make_stripes, VGG, partial(SGD, weight_decay=5e-4)),
    tags=frozenset({"convolutional"}),
)


# DenseNet-121: every layer takes the outputs of all layers before it in its stage.


class DenseStage(nn.Module):
    """Each layer adds `growth` channels to those it takes."""

    def __init__(self, inputs: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                *narrowed(inputs + number * growth, 4 * growth, 1), *narrowed(4 * growth, growth, 3)
            )
            for number in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [x]
        for layer in self.layers:
            outputs.append(layer(torch.cat(outputs, 1)))
        return torch.cat(outputs, 1)


def narrowed(inputs: int, outputs: int, size: int) -> tuple[nn.Module, ...]:
    """Return a convolution after its norm."""
    layer = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
    return nn.BatchNorm2d(inputs), nn.ReLU(), layer


def densenet(config: Config) -> nn.Module:
    width = 2 * config.growth
    layers: list[nn.Module] = [resnet_stem(width)]
    for stage, count in enumerate(map(int, config.blocks.split(","))):
        if stage:
            layers += [*narrowed(width, width // 2, 1), nn.AvgPool2d(2)]
            width //= 2
        layers.append(DenseStage(width, config.growth, count))
        width += count * config.growth
    layers += [nn.BatchNorm2d(width), nn.ReLU(), Mean(2, 3)]
    return nn.Sequential(*layers, nn.Linear(width, config.classes))


DENSENET121 = {
    "batch": 32, "batches": 4, "image": 224, "classes": 1000, "directions": 16, "growth": 32,
    "blocks": "6,12,24,16", "lr": 0.05,
}  # fmt: skip
DENSENET121_TINY = {
    "batch": 8, "image": 32, "classes": 8, "directions": 4, "growth": 8, "blocks": "2,2",
}  # fmt: skip
DENSENET121_WORKLOAD = TrainingWorkload(
    name="densenet121",
    task="image classification",
    source="Huang et al., Densely Connected Convolutional Networks, 2017",
    samples="images",
    sizes=in_sizes(DENSENET121, tiny=DENSENET121_TINY, paper={"batch": 256, "lr": 0.1}),
    targets={"tiny": Target(1.0, 60), "small": Target(4.0, 60), "paper": Target(4.0, 60)},
    build=train_on(make_stripes, densenet, SGD),
    tags=frozenset({"convolutional", "extra"}),
)


# Video: which way the stripes of a clip move, by convolutions in space and time.

CLIP_WAVELENGTH, CLIP_NOISE = 8, 0.5


def video_net(config: Config) -> nn.Module:
    """Stack stages of two 3x3x3 convolutions; each halves the clip in time and space."""
    layers, inputs = [], 3
    for stage in range(config.stages):
        width = config.width << stage
        for channels in (inputs, width):
            layers.append(nn.Conv3d(channels, width, 3, padding=1, bias=False))
            layers += [nn.BatchNorm3d(width), nn.ReLU()]
        layers.append(nn.MaxPool3d(2))
        inputs = width
    return nn.Sequential(*layers, Mean(2, 3, 4), nn.Linear(inputs, config.classes))


@in_batches
def make_clips(config: Config, draw: torch.Generator) -> Iterator[Labelled]:
    """Clips [batch, 3, frames, image, image] and labels: the label is the speed of the stripes."""
    device = draw.device
    pixels = torch.arange(config.image, device=device).view(1, 1, 1, -1) / CLIP_WAVELENGTH
    times = torch.arange(config.frames, device=device).view(1, -1, 1, 1)
    shape = (config.batch, 3, config.frames, config.image, config.image)
    while True:
        labels = torch.randint(config.speeds, (config.batch,), generator=draw, device=device)
        speeds = (labels / config.speeds - 0.5).view(-1, 1, 1, 1)
        phases = torch.rand((config.batch, 1, 1, 1), generator=draw, device=device)
        waves = torch.sin(2 * torch.pi * (pixels + speeds * times + phases))
        noise = torch.randn(shape, generator=draw, device=device)
        yield waves[:, None] + CLIP_NOISE * noise, labels


C3D = {
    "batch": 8, "batches": 4, "frames": 16, "image": 96, "classes": 400, "speeds": 8, "width": 32,
    "stages": 4, "lr": 0.02,
}  # fmt: skip
C3D_TINY = {
    "batch": 4, "frames": 8, "image": 16, "classes": 4, "speeds": 4, "width": 8, "stages": 2,
    "lr": 0.05,
}  # fmt: skip
C3D_WORKLOAD = TrainingWorkload(
    name="c3d",
    task="video classification",
    source="Tran et al., Learning Spatiotemporal Features with 3D Convolutional Networks, 2015",
    samples="clips",
    sizes=in_sizes(C3D, tiny=C3D_TINY, paper={"batch": 30, "image": 112, "width": 64}),
    targets={"tiny": Target(1.0, 60), "small": Target(3.0, 60), "paper": Target(3.0, 60)},
    build=train_on(make_clips, video_net, SGD),
    tags=frozenset({"convolutional", "extra"}),
)
