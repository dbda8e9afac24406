"""A variational autoencoder: images of stripes through a few random numbers and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.resnet50 import convolution, make_stripes

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace


class VariationalAutoencoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        widths = [config.width << number for number in range(config.halvings)]
        self.side = config.image >> config.halvings
        deepest = widths[-1] * self.side**2
        down, inputs = [], 3
        for width in widths:
            down += [*convolution(inputs, width, 3, 2), nn.LeakyReLU()]
            inputs = width
        self.down = nn.Sequential(*down, nn.Flatten())
        self.mean, self.spread = nn.Linear(deepest, config.code), nn.Linear(deepest, config.code)
        up: list[nn.Module] = [
            nn.Linear(config.code, deepest),
            nn.Unflatten(1, (widths[-1], self.side, self.side)),
        ]
        for width in [*reversed(widths[:-1]), config.width]:
            up += [nn.Upsample(scale_factor=2), *convolution(inputs, width, 3), nn.SiLU()]
            inputs = width
        self.up = nn.Sequential(*up, nn.Conv2d(inputs, 3, 3, padding=1))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The images again, and the distribution that their code was drawn from."""
        x = self.down(images)
        mean, spread = self.mean(x), self.spread(x)
        code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.up(code), mean, spread


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(VariationalAutoencoder(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    batches = make_stripes(config, place)

    def step(number: int) -> torch.Tensor:
        images, _ = batches[number % len(batches)]
        again, mean, spread = model(images)
        distance = -0.5 * (1 + spread - mean**2 - spread.exp()).sum(1).mean()
        loss = functional.mse_loss(again.float(), images) + config.distance * distance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


VAE = {
    "batch": 64,
    "batches": 4,
    "image": 128,
    "directions": 16,
    "width": 32,
    "halvings": 4,
    "code": 128,
    "distance": 1e-3,  # how much the code's distribution counts
    "lr": 1e-3,
}
TINY = {"batch": 8, "image": 32, "directions": 4, "width": 16, "halvings": 2, "code": 16}
WORKLOAD = TrainingWorkload(
    name="vae",
    task="image generation",
    source="Kingma and Welling, Auto-Encoding Variational Bayes, 2014 (convolutional)",
    samples="images",
    sizes={
        "tiny": {**VAE, **TINY, "lr": 3e-3},
        "small": VAE,
        "paper": {**VAE, "batch": 256},
    },
    targets={
        "tiny": Target(loss=0.7, steps=60),
        "small": Target(loss=0.75, steps=60),
        "paper": Target(loss=0.75, steps=60),
    },
    build=build,
    tags=frozenset({"convolutional", "extra"}),
)
