"""Classifiers of images that save arithmetic: Inception-v3 by parallel narrow paths,
MobileNet-v3 by depthwise convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Config, Step, Target, TrainingPlace, TrainingWorkload
from stepscope.bench.workloads.building_blocks import (
    in_sizes,
    initialize_convolutions,
    lean_convolution,
    train_on,
    whole_eights,
)
from stepscope.bench.workloads.image_classifiers import make_stripes

# Inception-v3: which way noisy stripes run; parallel paths, joined, and a second head midway.

AUXILIARY_WEIGHT = 0.3


class ParallelPaths(nn.Module):
    """Every path sees the same input; their channels are joined."""

    def __init__(self, *paths: nn.Module) -> None:
        super().__init__()
        self.paths = nn.ModuleList(paths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([path(x) for path in self.paths], 1)


@dataclass(frozen=True)
class InceptionBlocks:
    """Makes the blocks in the paper's channels, all of them times `sixteenths` / 16."""

    sixteenths: int

    def channels(self, published: int) -> int:
        return published * self.sixteenths // 16

    def convolution(
        self, inputs: int, outputs: int, size: tuple[int, int], stride: int = 1, padded: bool = True
    ) -> nn.Sequential:
        """With its norm and activation; inputs of 3 are the image's colours."""
        before = 3 if inputs == 3 else self.channels(inputs)
        padding = (size[0] // 2, size[1] // 2) if padded else 0
        layer = nn.Conv2d(before, self.channels(outputs), size, stride, padding, bias=False)
        nn.init.trunc_normal_(layer.weight, std=0.1, a=-0.2, b=0.2)
        norm = nn.BatchNorm2d(self.channels(outputs), eps=1e-3)
        return nn.Sequential(layer, norm, nn.ReLU())

    def path(
        self, inputs: int, *steps: tuple[int, int, int], halves: bool = False
    ) -> nn.Sequential:
        """Convolutions as (channels, height, width); with `halves`, the last has a stride of 2."""
        layers = []
        for number, (outputs, *size) in enumerate(steps, 1):
            last = halves and number == len(steps)
            layers.append(
                self.convolution(inputs, outputs, (size[0], size[1]), 1 + last, padded=not last)
            )
            inputs = outputs
        return nn.Sequential(*layers)

    def pool(self, inputs: int, outputs: int) -> nn.Sequential:
        pool = nn.AvgPool2d(3, 1, padding=1)
        return nn.Sequential(pool, self.convolution(inputs, outputs, (1, 1)))

    def squares(self, inputs: int, pooled: int) -> nn.Module:
        """Figure 5 of the paper: 5x5 and twice 3x3."""
        return ParallelPaths(
            self.path(inputs, (64, 1, 1)),
            self.path(inputs, (48, 1, 1), (64, 5, 5)),
            self.path(inputs, (64, 1, 1), (96, 3, 3), (96, 3, 3)),
            self.pool(inputs, pooled),
        )

    def rows_and_columns(self, inputs: int, narrow: int) -> nn.Module:
        """Figure 6: 7x7 as a row and a column."""
        row, column = (narrow, 1, 7), (narrow, 7, 1)
        return ParallelPaths(
            self.path(inputs, (192, 1, 1)),
            self.path(inputs, (narrow, 1, 1), row, (192, 7, 1)),
            self.path(inputs, (narrow, 1, 1), column, row, column, (192, 1, 7)),
            self.pool(inputs, 192),
        )

    def spread(self, inputs: int) -> nn.Module:
        """Figure 7: a row and a column side by side."""
        return ParallelPaths(
            self.path(inputs, (320, 1, 1)),
            nn.Sequential(self.path(inputs, (384, 1, 1)), self.fork(384)),
            nn.Sequential(self.path(inputs, (448, 1, 1), (384, 3, 3)), self.fork(384)),
            self.pool(inputs, 192),
        )

    def fork(self, inputs: int) -> nn.Module:
        return ParallelPaths(self.path(inputs, (384, 1, 3)), self.path(inputs, (384, 3, 1)))

    def halve(self, inputs: int, *paths: tuple[tuple[int, int, int], ...]) -> nn.Module:
        """Figure 10: convolutions and a pool of stride 2 side by side."""
        halving = (self.path(inputs, *steps, halves=True) for steps in paths)
        return ParallelPaths(*halving, nn.MaxPool2d(3, 2))


class InceptionV3(nn.Module):
    """Returns the class scores of both heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        make = InceptionBlocks(config.sixteenths)
        self.features = nn.Sequential(
            make.convolution(3, 32, (3, 3), 2, padded=False),
            make.convolution(32, 32, (3, 3), padded=False),
            make.convolution(32, 64, (3, 3)),
            nn.MaxPool2d(3, 2),
            make.convolution(64, 80, (1, 1)),
            make.convolution(80, 192, (3, 3), padded=False),
            nn.MaxPool2d(3, 2),
            make.squares(192, 32),
            make.squares(256, 64),
            make.squares(288, 64),
            make.halve(288, ((384, 3, 3),), ((64, 1, 1), (96, 3, 3), (96, 3, 3))),
            make.rows_and_columns(768, 128),
            make.rows_and_columns(768, 160),
            make.rows_and_columns(768, 160),
            make.rows_and_columns(768, 192),
        )
        self.late_features = nn.Sequential(
            make.halve(
                768,
                ((192, 1, 1), (320, 3, 3)),
                ((192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3)),
            ),
            make.spread(1280),
            make.spread(2048),
        )
        self.head = nn.Sequential(
            nn.Dropout(config.dropout), nn.Linear(make.channels(2048), config.classes)
        )
        self.auxiliary_head = nn.Sequential(
            nn.AvgPool2d(config.auxiliary_stride + 2, config.auxiliary_stride),
            make.convolution(768, 128, (1, 1)),
            make.convolution(128, 768, (5, 5), padded=False),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(make.channels(768), config.classes),
        )

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.features(images)
        return self.head(self.late_features(x).mean((2, 3))), self.auxiliary_head(x)


def build_inception_v3(config: Config, place: TrainingPlace) -> Step:
    """The loss returned is the main head's: the auxiliary head only helps training."""
    model = place.put(InceptionV3(config))
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=config.lr, alpha=0.9, eps=1.0, momentum=0.9
    )
    batches = make_stripes(config, place)

    def step(number: int) -> torch.Tensor:
        images, labels = batches[number % len(batches)]
        scores, auxiliary_scores = model(images)
        loss = functional.cross_entropy(scores.float(), labels)
        auxiliary_loss = functional.cross_entropy(auxiliary_scores.float(), labels)
        optimizer.zero_grad()
        (loss + AUXILIARY_WEIGHT * auxiliary_loss).backward()
        optimizer.step()
        return loss

    return step


# The width is in sixteenths of the published one. An image of 139 pixels is the smallest whose
# auxiliary head has the five pixels that it needs.
INCEPTION_V3 = {
    "batch": 64, "batches": 4, "image": 299, "classes": 1000, "directions": 16, "sixteenths": 16,
    "auxiliary_stride": 3, "dropout": 0.2, "lr": 0.045,
}  # fmt: skip
INCEPTION_TINY = {
    "batch": 6, "image": 139, "classes": 16, "directions": 4, "sixteenths": 1,
    "auxiliary_stride": 1, "lr": 0.02,
}  # fmt: skip
INCEPTION_V3_WORKLOAD = TrainingWorkload(
    name="inception-v3",
    task="image classification",
    source="Szegedy et al., Rethinking the Inception Architecture for Computer Vision, 2016",
    samples="images",
    sizes=in_sizes(INCEPTION_V3, tiny=INCEPTION_TINY, paper={"batch": 128}),
    targets={"tiny": Target(1.0, 40), "small": Target(6.2, 60), "paper": Target(6.2, 60)},
    build=build_inception_v3,
    tags=frozenset({"convolutional"}),
)


# MobileNet-v3-large: which way noisy stripes run; depthwise convolutions, squeeze and excite.

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
        widen = (*lean_convolution(inputs, wide, 1), activation()) if wide != inputs else ()
        gate = (SqueezeExcite(wide),) if gated else ()
        self.path = nn.Sequential(
            *widen,
            *lean_convolution(wide, wide, size, stride, groups=wide),
            *gate,
            activation(),
            *lean_convolution(wide, outputs, 1),
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
        layers = [*lean_convolution(3, inputs, 3, 2), nn.Hardswish()]
        for size, wide, outputs, gated, swish, stride in BLOCKS:
            layers.append(
                InvertedResidual(inputs, scaled(wide), scaled(outputs), size, gated, swish, stride)
            )
            inputs = scaled(outputs)
        last = scaled(960)
        self.features = nn.Sequential(*layers, *lean_convolution(inputs, last, 1), nn.Hardswish())
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


RMSPROP = partial(torch.optim.RMSprop, alpha=0.9, momentum=0.9, weight_decay=1e-5)
MOBILENET_LARGE = {
    "batch": 128, "batches": 4, "image": 224, "classes": 1000, "directions": 16, "width": 1.0,
    "lr": 1e-4,
}  # fmt: skip
MOBILENET_TINY = {
    "batch": 16, "image": 32, "classes": 16, "directions": 4, "width": 0.25, "lr": 5e-4,
}  # fmt: skip
MOBILENET_V3_LARGE_WORKLOAD = TrainingWorkload(
    name="mobilenet-v3-large",
    task="image classification",
    source="Howard et al., Searching for MobileNetV3, 2019 (large, width 1.0)",
    samples="images",
    sizes=in_sizes(MOBILENET_LARGE, tiny=MOBILENET_TINY, paper={"batch": 512}),
    targets={"tiny": Target(1.0, 40), "small": Target(6.2, 60), "paper": Target(6.2, 60)},
    build=train_on(make_stripes, MobileNetV3, RMSPROP),
    tags=frozenset({"convolutional"}),
)
