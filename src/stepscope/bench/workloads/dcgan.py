"""DCGAN: a generator learns to draw discs from a discriminator that tells them from real ones.

Neither loss falls for good in this game: each net's gain is the other's loss. The step returns
how far the mean of the generated images is from the mean of the real ones (root of the mean
square over pixels). It falls only when the discriminator teaches the generator something.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace


class DCGANGenerator(nn.Module):
    """Noise to 4x4 pixels, then convolutions that each double the image: four make 64x64."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        widths = [config.width << times for times in reversed(range(doublings(config)))]
        layers = [nn.ConvTranspose2d(config.noise, widths[0], 4, bias=False)]
        for inputs, outputs in zip(widths, (*widths[1:], 3), strict=True):
            double = nn.ConvTranspose2d(inputs, outputs, 5, 2, 2, output_padding=1, bias=False)
            layers += [nn.BatchNorm2d(inputs), nn.ReLU(), double]
        self.layers = nn.Sequential(*layers, nn.Tanh())
        initialize(self)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.layers(noise[:, :, None, None])
        return x


class DCGANDiscriminator(nn.Module):
    """Convolutions that each halve the image, down to 4x4; one score: real above zero."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        widths = [config.width << times for times in range(doublings(config))]
        layers = [nn.Conv2d(3, widths[0], 5, 2, 2, bias=False), nn.LeakyReLU(0.2)]
        for inputs, outputs in itertools.pairwise(widths):
            halve = nn.Conv2d(inputs, outputs, 5, 2, 2, bias=False)
            layers += [halve, nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2)]
        score = nn.Linear(16 * widths[-1], 1)
        self.layers = nn.Sequential(*layers, nn.Flatten(), score)
        initialize(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(images)
        return scores


def doublings(config: Config) -> int:
    """From 4x4 pixels to the whole image."""
    return int(math.log2(config.image // 4))


def initialize(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            nn.init.normal_(layer.weight, std=0.02)
        elif isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight, mean=1.0, std=0.02)


def make_discs(config: Config, place: TrainingPlace) -> list[torch.Tensor]:
    """A bright disc near the middle of a dark image, from -1 to 1: size and colours vary."""
    draw, device, shape = place.generator(), place.device, (config.batch, 1, 1, 1)
    places = torch.linspace(-1, 1, config.image, device=device)

    def between(low: float, high: float, channels: int = 1) -> torch.Tensor:
        drawn = torch.rand((shape[0], channels, 1, 1), generator=draw, device=device)
        return low + (high - low) * drawn

    batches = []
    for _ in range(config.batches):
        right, down = places - between(-0.3, 0.3), places[:, None] - between(-0.3, 0.3)
        inside = ((between(0.4, 0.7) - (right**2 + down**2).sqrt()) * 10).sigmoid()
        bright, dark = between(0.2, 1.0, channels=3), between(-1.0, -0.6, channels=3)
        batches.append(dark + (bright - dark) * inside)
    return batches


def distance_of_means(real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    difference = real.detach().mean(0) - fake.detach().float().mean(0)
    return difference.square().mean().sqrt()


def build(config: Config, place: TrainingPlace) -> Step:
    own_discriminator = DCGANDiscriminator(config)
    generator, discriminator = place.put(DCGANGenerator(config)), place.put(own_discriminator)
    optimizers = [
        torch.optim.Adam(model.parameters(), lr=config.lr, betas=(0.5, 0.999))
        for model in (generator, discriminator)
    ]
    batches = make_discs(config, place)
    real_label = torch.ones((config.batch, 1), device=place.device)
    fake_label = torch.zeros_like(real_label)

    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(scores.float(), labels)

    def step(number: int) -> torch.Tensor:
        real = batches[number % len(batches)]
        fake = generator(torch.randn((config.batch, config.noise), device=place.device))
        for optimizer in optimizers:
            optimizer.zero_grad()
        # Real and generated images never meet in one batch: the norms' means would give them away.
        loss(discriminator(real), real_label).backward()
        loss(discriminator(fake.detach()), fake_label).backward()
        optimizers[1].step()
        own_discriminator.requires_grad_(False)  # it only passes gradients on to the generator
        loss(own_discriminator(fake), real_label).backward()
        own_discriminator.requires_grad_(True)
        optimizers[0].step()
        return distance_of_means(real, fake)

    return step


DCGAN = {
    "batch": 128,
    "batches": 4,
    "image": 64,  # 4 times a power of two
    "noise": 100,
    "width": 128,
    "lr": 2e-4,
}
WORKLOAD = TrainingWorkload(
    name="dcgan",
    task="image generation",
    source="Radford et al., Unsupervised Representation Learning with DCGANs, 2016",
    samples="images",
    sizes={
        "tiny": {**DCGAN, "batch": 16, "image": 16, "width": 8, "noise": 16, "lr": 3e-3},
        "small": {**DCGAN, "width": 64},
        "paper": DCGAN,
    },
    targets={
        "tiny": Target(loss=0.4, steps=40),
        "small": Target(loss=0.6, steps=60),
        "paper": Target(loss=0.6, steps=60),
    },
    build=build,
    tags=frozenset({"convolutional", "adversarial"}),
)
