"""Generators of images that learn from the images alone: DDPM's U-Net, a variational
autoencoder.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Config, Step, Target, TrainingPlace, TrainingWorkload, descend
from stepscope.bench.workloads.building_blocks import attend, convolution, in_sizes
from stepscope.bench.workloads.gans import make_discs
from stepscope.bench.workloads.image_classifiers import make_stripes

# DDPM's U-Net: the noise that was added to images of discs, from the noisy image and its time.

TIMES = 1000  # from the image to pure noise


class TimedResidual(nn.Module):
    """Two convolutions; the time is added between them."""

    def __init__(self, inputs: int, outputs: int, config: Config) -> None:
        super().__init__()
        first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.before = nn.Sequential(nn.GroupNorm(config.groups, inputs), nn.SiLU(), first)
        self.time = nn.Linear(4 * config.width, outputs)
        last = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.after = nn.Sequential(
            nn.GroupNorm(config.groups, outputs), nn.SiLU(), nn.Dropout(config.dropout), last
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        nn.init.zeros_(last.weight)  # as in the paper: every block starts as its shortcut

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.before(x) + self.time(functional.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.after(y)


class PixelAttention(nn.Module):
    """Every pixel attends to all others, with one head."""

    def __init__(self, width: int, config: Config) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(config.groups, width)
        self.project, self.join = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)
        nn.init.zeros_(self.join.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, 2)
        mixed = attend(*(part[:, None] for part in parts))
        return x + self.join(mixed.transpose(1, 2).reshape(x.shape))


class UNetLayer(nn.Module):
    """A residual block, with attention after it where the image is small."""

    def __init__(self, inputs: int, outputs: int, edge: int, config: Config) -> None:
        super().__init__()
        self.residual = TimedResidual(inputs, outputs, config)
        attends = edge == config.attention_edge
        self.attention = PixelAttention(outputs, config) if attends else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.attention(self.residual(x, time))
        return y


class DiffusionUNet(nn.Module):
    """Four levels down and up again; each layer on the way up also sees one of the way down."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, edge = config.width, config.image
        widths = [width, *(2 * width for _ in range(config.levels - 1))]
        self.width = width
        self.time = nn.Sequential(
            nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width)
        )
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        x, skipped = width, [width]
        for level, outputs in enumerate(widths):
            for _ in range(config.layers):
                self.down.append(UNetLayer(x, outputs, edge, config))
                x = outputs
                skipped.append(x)
            if level + 1 < len(widths):
                self.down.append(nn.Conv2d(x, x, 3, 2, padding=1))
                skipped.append(x)
                edge //= 2
        before, attention = TimedResidual(x, x, config), PixelAttention(x, config)
        self.middle = nn.ModuleList((before, attention, TimedResidual(x, x, config)))
        for level, outputs in reversed(list(enumerate(widths))):
            for _ in range(config.layers + 1):
                self.up.append(UNetLayer(x + skipped.pop(), outputs, edge, config))
                x = outputs
            if level:
                enlarge = nn.Upsample(scale_factor=2.0)
                self.up.append(nn.Sequential(enlarge, nn.Conv2d(x, x, 3, padding=1)))
                edge *= 2
        last = nn.Conv2d(x, 3, 3, padding=1)
        nn.init.zeros_(last.weight)
        self.last = nn.Sequential(nn.GroupNorm(config.groups, x), nn.SiLU(), last)

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        time = self.time(waves(times, self.width))
        x = self.first(images)
        skipped = [x]
        for layer in self.down:
            x = layer(x, time) if isinstance(layer, UNetLayer) else layer(x)
            skipped.append(x)
        before, attention, after = self.middle
        x = after(attention(before(x, time)), time)
        for layer in self.up:
            if isinstance(layer, UNetLayer):
                x = layer(torch.cat((x, skipped.pop()), 1), time)
            else:
                x = layer(x)
        noise: torch.Tensor = self.last(x)
        return noise


def waves(times: torch.Tensor, width: int) -> torch.Tensor:
    """Write a time as sines and cosines of many wavelengths, as a Transformer's positions."""
    half = width // 2
    exponents = torch.arange(half, device=times.device) / (half - 1)
    angles = times[:, None] * torch.exp(-math.log(10_000) * exponents)
    return torch.cat((angles.sin(), angles.cos()), 1)


def build_diffusion_unet(config: Config, place: TrainingPlace) -> Step:
    model = place.put(DiffusionUNet(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    batches = make_discs(config, place)
    left = (1 - torch.linspace(1e-4, 0.02, TIMES, device=place.device)).cumprod(0)

    def step(number: int) -> torch.Tensor:
        images = batches[number % len(batches)]
        times = torch.randint(TIMES, (len(images),), device=place.device)
        noise = torch.randn_like(images)
        share = left[times].view(-1, 1, 1, 1)  # of the image that is left at that time
        predicted = model(share.sqrt() * images + (1 - share).sqrt() * noise, times)
        return descend(optimizer, functional.mse_loss(predicted.float(), noise))

    return step


# Each level has `layers`, norms have `groups` of channels, and attention comes where the image has
# `attention_edge` pixels a side.
DDPM = {
    "batch": 128, "batches": 4, "image": 32, "width": 128, "levels": 4, "layers": 2,
    "attention_edge": 16, "groups": 32, "dropout": 0.1, "lr": 2e-4,
}  # fmt: skip
DIFFUSION_TINY = {
    "batch": 8, "image": 16, "width": 8, "levels": 3, "layers": 1, "attention_edge": 8,
    "groups": 4, "dropout": 0.0, "lr": 2e-3,
}  # fmt: skip
DIFFUSION_UNET_WORKLOAD = TrainingWorkload(
    name="diffusion-unet",
    task="image generation",
    source="Ho et al., Denoising Diffusion Probabilistic Models, 2020 (CIFAR-10 model)",
    samples="images",
    sizes=in_sizes(DDPM, tiny=DIFFUSION_TINY, small={"batch": 64}),
    targets={"tiny": Target(0.75, 30), "small": Target(0.9, 60), "paper": Target(0.9, 60)},
    build=build_diffusion_unet,
    tags=frozenset({"convolutional", "attention", "diffusion"}),
)


# A variational autoencoder: images of stripes through a few random numbers and back.


class VariationalAutoencoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        widths = [config.width << number for number in range(config.halvings)]
        side = config.image >> config.halvings
        deepest = widths[-1] * side**2
        down, inputs = [], 3
        for width in widths:
            down += [*convolution(inputs, width, 3, 2), nn.LeakyReLU()]
            inputs = width
        self.down = nn.Sequential(*down, nn.Flatten())
        self.mean, self.spread = nn.Linear(deepest, config.code), nn.Linear(deepest, config.code)
        up = [nn.Linear(config.code, deepest), nn.Unflatten(1, (widths[-1], side, side))]
        for width in [*reversed(widths[:-1]), config.width]:
            up += [nn.Upsample(scale_factor=2), *convolution(inputs, width, 3), nn.SiLU()]
            inputs = width
        self.up = nn.Sequential(*up, nn.Conv2d(inputs, 3, 3, padding=1))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the images again, and the distribution that their code was drawn from."""
        x = self.down(images)
        mean, spread = self.mean(x), self.spread(x)
        code = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.up(code), mean, spread


def build_vae(config: Config, place: TrainingPlace) -> Step:
    model = place.put(VariationalAutoencoder(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    batches = make_stripes(config, place)

    def step(number: int) -> torch.Tensor:
        images, _ = batches[number % len(batches)]
        again, mean, spread = model(images)
        distance = -0.5 * (1 + spread - mean**2 - spread.exp()).sum(1).mean()
        loss = functional.mse_loss(again.float(), images) + config.distance * distance
        return descend(optimizer, loss)

    return step


# `distance` is how much the code's distribution counts.
VAE = {
    "batch": 64, "batches": 4, "image": 128, "directions": 16, "width": 32, "halvings": 4,
    "code": 128, "distance": 1e-3, "lr": 1e-3,
}  # fmt: skip
VAE_TINY = {
    "batch": 8, "image": 32, "directions": 4, "width": 16, "halvings": 2, "code": 16, "lr": 3e-3,
}  # fmt: skip
VAE_WORKLOAD = TrainingWorkload(
    name="vae",
    task="image generation",
    source="Kingma and Welling, Auto-Encoding Variational Bayes, 2014 (convolutional)",
    samples="images",
    sizes=in_sizes(VAE, tiny=VAE_TINY, paper={"batch": 256}),
    targets={"tiny": Target(0.7, 60), "small": Target(0.75, 60), "paper": Target(0.75, 60)},
    build=build_vae,
    tags=frozenset({"convolutional", "extra"}),
)
