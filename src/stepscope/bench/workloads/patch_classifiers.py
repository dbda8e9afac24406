"""Classifiers that cut an image into patches: Swin, MLP-Mixer, ConvNeXt."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Config, Step, Target, TrainingPlace, TrainingWorkload
from stepscope.bench.workloads.image_classifiers import make_stripes, train_classifier

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


def build_swin(config: Config, place: TrainingPlace) -> Step:
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
SWIN_TINY = {"batch": 8, "image": 32, "classes": 8, "directions": 4, "width": 32, "window": 4}
SWIN_WORKLOAD = TrainingWorkload(
    name="swin",
    task="image classification",
    source="Liu et al., Swin Transformer, 2021 (Swin-T)",
    samples="images",
    sizes={
        "tiny": {**SWIN_T, **SWIN_TINY, "blocks": "2,2"},
        "small": SWIN_T,
        "paper": {**SWIN_T, "batch": 128},
    },
    targets={
        "tiny": Target(loss=1.2, steps=60),
        "small": Target(loss=4.0, steps=60),
        "paper": Target(loss=4.0, steps=60),
    },
    build=build_swin,
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


def build_mlp_mixer(config: Config, place: TrainingPlace) -> Step:
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
MIXER_TINY = {"batch": 8, "image": 32, "patch": 8, "classes": 8, "directions": 4, "width": 32}
MLP_MIXER_WORKLOAD = TrainingWorkload(
    name="mlp-mixer",
    task="image classification",
    source="Tolstikhin et al., MLP-Mixer: An all-MLP Architecture for Vision, 2021 (S/16)",
    samples="images",
    sizes={
        "tiny": {**MIXER_S16, **MIXER_TINY, "across_places": 32, "layers": 2, "lr": 3e-3},
        "small": MIXER_S16,
        "paper": {**MIXER_S16, "batch": 256},
    },
    targets={
        "tiny": Target(loss=1.2, steps=60),
        "small": Target(loss=4.0, steps=60),
        "paper": Target(loss=4.0, steps=60),
    },
    build=build_mlp_mixer,
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


def build_convnext(config: Config, place: TrainingPlace) -> Step:
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
CONVNEXT_TINY = {
    "batch": 8,
    "image": 32,
    "classes": 8,
    "directions": 4,
    "width": 16,
    "blocks": "1,1",
}
CONVNEXT_WORKLOAD = TrainingWorkload(
    name="convnext",
    task="image classification",
    source="Liu et al., A ConvNet for the 2020s, 2022 (ConvNeXt-T)",
    samples="images",
    sizes={
        "tiny": {**CONVNEXT_T, **CONVNEXT_TINY, "lr": 3e-3},
        "small": CONVNEXT_T,
        "paper": {**CONVNEXT_T, "batch": 128},
    },
    targets={
        "tiny": Target(loss=1.2, steps=60),
        "small": Target(loss=4.0, steps=60),
        "paper": Target(loss=4.0, steps=60),
    },
    build=build_convnext,
    tags=frozenset({"convolutional", "extra"}),
)
