"""Video: which way the stripes of a clip move, by convolutions in space and time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.resnet50 import train_classifier

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace


WAVELENGTH, NOISE = 8, 0.5


class VideoNet(nn.Module):
    """Stages of two 3x3x3 convolutions; each halves the clip in time and space."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        layers, inputs = [], 3
        for number in range(config.stages):
            width = config.width << number
            layers += [*video_convolution(inputs, width), *video_convolution(width, width)]
            layers.append(nn.MaxPool3d(2))
            inputs = width
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, config.classes)

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(clips).mean((2, 3, 4)))
        return logits


def video_convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    layer = nn.Conv3d(inputs, outputs, 3, padding=1, bias=False)
    return layer, nn.BatchNorm3d(outputs), nn.ReLU()


def make_clips(config: Config, place: TrainingPlace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Clips [batch, 3, frames, image, image] and labels: the label is the speed of the stripes."""
    draw, device = place.generator(), place.device
    pixels = torch.arange(config.image, device=device).view(1, 1, 1, -1) / WAVELENGTH
    times = torch.arange(config.frames, device=device).view(1, -1, 1, 1)
    shape = (config.batch, 3, config.frames, config.image, config.image)
    batches = []
    for _ in range(config.batches):
        labels = torch.randint(config.speeds, (config.batch,), generator=draw, device=device)
        speeds = (labels / config.speeds - 0.5).view(-1, 1, 1, 1)
        phases = torch.rand((config.batch, 1, 1, 1), generator=draw, device=device)
        waves = torch.sin(2 * torch.pi * (pixels + speeds * times + phases))
        noise = torch.randn(shape, generator=draw, device=device)
        batches.append((waves[:, None] + NOISE * noise, labels))
    return batches


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(VideoNet(config))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9, weight_decay=1e-4)
    return train_classifier(model, optimizer, make_clips(config, place))


C3D = {
    "batch": 8,
    "batches": 4,
    "frames": 16,
    "image": 96,
    "classes": 400,  # of which the first `speeds` occur
    "speeds": 8,
    "width": 32,
    "stages": 4,
    "lr": 0.02,
}
TINY = {"batch": 4, "frames": 8, "image": 16, "classes": 4, "speeds": 4, "width": 8, "stages": 2}
WORKLOAD = TrainingWorkload(
    name="c3d",
    task="video classification",
    source="Tran et al., Learning Spatiotemporal Features with 3D Convolutional Networks, 2015",
    samples="clips",
    sizes={
        "tiny": {**C3D, **TINY, "lr": 0.05},
        "small": C3D,
        "paper": {**C3D, "batch": 30, "image": 112, "width": 64},
    },
    targets={
        "tiny": Target(loss=1.0, steps=60),
        "small": Target(loss=3.0, steps=60),
        "paper": Target(loss=3.0, steps=60),
    },
    build=build,
    tags=frozenset({"convolutional", "extra"}),
)
