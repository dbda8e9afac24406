"""Classifiers that cut an image into patches: Swin, MLP-Mixer, ConvNeXt."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Config, Target, TrainingWorkload
from stepscope.bench.workloads.building_blocks import Mean, feed_forward, in_sizes, train_on
from stepscope.bench.workloads.image_classifiers import make_stripes

ADAMW = partial(torch.optim.AdamW, weight_decay=0.05)


class Patches(nn.Module):
    """Cut images into places: (batch, places, width)."""

    def __init__(self, width: int, edge: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, edge, edge)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        places: torch.Tensor = self.cut(images).flatten(2).transpose(1, 2)
        return places


# Swin: attention inside windows of an image, which are shifted in every second block.


class SwinBlock(nn.Module):
    """Attention with a learned bias of places, inside windows."""

    def __init__(self, width: int, side: int, window: int, shift: int) -> None:
        super().__init__()
        self.side, self.window, self.shift = side, window, shift
        self.heads = width // 32
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(self.heads, window**2, window**2))
        self.feed = feed_forward(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, _, width = x.shape
        count, size = self.side // self.window, self.window
        places = self.before_attention(x).view(batch, self.side, self.side, width)
        places = places.roll((-self.shift, -self.shift), (1, 2))
        windows = places.view(batch, count, size, count, size, -1).transpose(2, 3)
        windows = windows.reshape(-1, size * size, width)
        parts = self.project(windows).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2) + self.bias
        mixed = (scores.softmax(-1).to(value.dtype) @ value).transpose(1, 2).flatten(2)
        windows = self.join(mixed).view(batch, count, count, size, size, -1).transpose(2, 3)
        places = windows.reshape(batch, self.side, self.side, width)
        x = x + places.roll((self.shift, self.shift), (1, 2)).reshape(batch, -1, width)
        return x + self.feed(self.before_feed(x))


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


def swin(config: Config) -> nn.Module:
    width, side = config.width, config.image // 4
    layers: list[nn.Module] = [Patches(width, 4)]
    for stage, blocks in enumerate(map(int, config.blocks.split(","))):
        if stage:
            layers.append(MergePlaces(width, side))
            width, side = 2 * width, side // 2
        for number in range(blocks):
            shift = config.window // 2 if number % 2 and side > config.window else 0
            layers.append(SwinBlock(width, side, config.window, shift))
    return nn.Sequential(*layers, nn.LayerNorm(width), Mean(1), nn.Linear(width, config.classes))


SWIN_T = {
    "batch": 32, "batches": 4, "image": 224, "classes": 1000, "directions": 16, "width": 96,
    "window": 7, "blocks": "2,2,6,2", "lr": 1e-3,
}  # fmt: skip
SWIN_TINY = {
    "batch": 8, "image": 32, "classes": 8, "directions": 4, "width": 32, "window": 4,
    "blocks": "2,2",
}  # fmt: skip
SWIN_WORKLOAD = TrainingWorkload(
    name="swin",
    task="image classification",
    source="Liu et al., Swin Transformer, 2021 (Swin-T)",
    samples="images",
    sizes=in_sizes(SWIN_T, tiny=SWIN_TINY, paper={"batch": 128}),
    targets={"tiny": Target(1.2, 60), "small": Target(4.0, 60), "paper": Target(4.0, 60)},
    build=train_on(make_stripes, swin, ADAMW),
    tags=frozenset({"attention", "extra"}),
)


# MLP-Mixer: feed-forward layers along the places of an image and across its channels.


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


def mixer(config: Config) -> nn.Module:
    places, width = (config.image // config.patch) ** 2, config.width
    layers: list[nn.Module] = [Patches(width, config.patch)]
    layers += [MixerBlock(config, places) for _ in range(config.layers)]
    return nn.Sequential(*layers, nn.LayerNorm(width), Mean(1), nn.Linear(width, config.classes))


MIXER_S16 = {
    "batch": 64, "batches": 4, "image": 224, "patch": 16, "classes": 1000, "directions": 16,
    "width": 512, "across_places": 256, "layers": 8, "lr": 1e-3,
}  # fmt: skip
MIXER_TINY = {
    "batch": 8, "image": 32, "patch": 8, "classes": 8, "directions": 4, "width": 32,
    "across_places": 32, "layers": 2, "lr": 3e-3,
}  # fmt: skip
MLP_MIXER_WORKLOAD = TrainingWorkload(
    name="mlp-mixer",
    task="image classification",
    source="Tolstikhin et al., MLP-Mixer: An all-MLP Architecture for Vision, 2021 (S/16)",
    samples="images",
    sizes=in_sizes(MIXER_S16, tiny=MIXER_TINY, paper={"batch": 256}),
    targets={"tiny": Target(1.2, 60), "small": Target(4.0, 60), "paper": Target(4.0, 60)},
    build=train_on(make_stripes, mixer, ADAMW),
    tags=frozenset({"extra"}),
)


# ConvNeXt: wide depthwise convolutions, and layers that see one place at a time.


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


def convnext(config: Config) -> nn.Module:
    width = config.width
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4)]
    for stage, blocks in enumerate(map(int, config.blocks.split(","))):
        if stage:
            layers.append(nn.Conv2d(width, 2 * width, 2, 2))
            width *= 2
        layers += [ConvNextBlock(width) for _ in range(blocks)]
    return nn.Sequential(*layers, Mean(2, 3), nn.LayerNorm(width), nn.Linear(width, config.classes))


CONVNEXT_T = {
    "batch": 32, "batches": 4, "image": 224, "classes": 1000, "directions": 16, "width": 96,
    "blocks": "3,3,9,3", "lr": 1e-3,
}  # fmt: skip
CONVNEXT_TINY = {
    "batch": 8, "image": 32, "classes": 8, "directions": 4, "width": 16, "blocks": "1,1",
    "lr": 3e-3,
}  # fmt: skip
CONVNEXT_WORKLOAD = TrainingWorkload(
    name="convnext",
    task="image classification",
    source="Liu et al., A ConvNet for the 2020s, 2022 (ConvNeXt-T)",
    samples="images",
    sizes=in_sizes(CONVNEXT_T, tiny=CONVNEXT_TINY, paper={"batch": 128}),
    targets={"tiny": Target(1.2, 60), "small": Target(4.0, 60), "paper": Target(4.0, 60)},
    build=train_on(make_stripes, convnext, ADAMW),
    tags=frozenset({"convolutional", "extra"}),
)
