"""MobileNet-v3-large: which way noisy stripes run; depthwise convolutions, squeeze and excite."""

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

# Table 1 of the paper: kernel, expanded channels, channels, squeeze and excite, hard swish, stride.
BLOCKS = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)


class SqueezeExcite(nn.Module):
    """Scale each channel by a gate that sees the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = whole_eights(channels / 4)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            nn.ReLU(),
            nn.Conv2d(squeezed, channels, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(x)


class InvertedResidual(nn.Module):
    """Widen, convolve each channel alone, gate, narrow without an activation."""

    def __init__(
        self, inputs: int, wide: int, outputs: int, size: int, gated: bool, swish: bool, stride: int
    ) -> None:
        super().__init__()
        activation = nn.Hardswish if swish else nn.ReLU
        widen = (*convolution(inputs, wide, 1), activation()) if wide != inputs else ()
        gate = (SqueezeExcite(wide),) if gated else ()
        self.path = nn.Sequential(
            *widen,
            *convolution(wide, wide, size, stride, groups=wide),
            *gate,
            activation(),
            *convolution(wide, outputs, 1),
        )
        self.same = inputs == outputs and stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.path(x)
        return x + y if self.same else y


class MobileNetV3(nn.Module):
    """A width below 1 narrows every layer, as the paper's multiplier does."""

    def __init__(self, config: Config) -> None:
        super().__init__()

        def scaled(channels: int) -> int:
            return whole_eights(channels * config.width)

        inputs = scaled(16)
        layers = [*convolution(3, inputs, 3, 2), nn.Hardswish()]
        for size, wide, outputs, gated, swish, stride in BLOCKS:
            layers.append(
                InvertedResidual(inputs, scaled(wide), scaled(outputs), size, gated, swish, stride)
            )
            inputs = scaled(outputs)
        last = scaled(960)
        self.features = nn.Sequential(*layers, *convolution(inputs, last, 1), nn.Hardswish())
        hidden = scaled(1280)
        self.head = nn.Sequential(
            nn.Linear(last, hidden),
            nn.Hardswish(),
            nn.Dropout(0.2),
            nn.Linear(hidden, config.classes),
        )
        initialize_convolutions(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.head(self.features(images).mean((2, 3)))
        return x


def whole_eights(channels: float) -> int:
    """The nearest multiple of eight, at least eight, never under nine tenths of `channels`."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8


def convolution(
    inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1
) -> tuple[nn.Module, ...]:
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False)
    return layer, nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01)


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(MobileNetV3(config))
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=config.lr, alpha=0.9, momentum=0.9, weight_decay=1e-5
    )
    return train_classifier(model, optimizer, make_stripes(config, place))


LARGE = {
    "batch": 128,
    "batches": 4,
    "image": 224,
    "classes": 1000,  # of which the first `directions` occur
    "directions": 16,
    "width": 1.0,
    "lr": 1e-4,
}
TINY = {"batch": 16, "image": 32, "classes": 16, "directions": 4, "width": 0.25, "lr": 5e-4}
WORKLOAD = TrainingWorkload(
    name="mobilenet-v3-large",
    task="image classification",
    source="Howard et al., Searching for MobileNetV3, 2019 (large, width 1.0)",
    samples="images",
    sizes={
        "tiny": {**LARGE, **TINY},
        "small": LARGE,
        "paper": {**LARGE, "batch": 512},
    },
    targets={
        "tiny": Target(loss=1.0, steps=40),
        "small": Target(loss=6.2, steps=60),
        "paper": Target(loss=6.2, steps=60),
    },
    build=build,
    tags=frozenset({"convolutional"}),
)
