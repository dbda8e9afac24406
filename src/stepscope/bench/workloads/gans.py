"""Generators of images that learn from a second network: DCGAN's discriminator, WGAN-GP's
critic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Config, Step, Target, TrainingPlace, TrainingWorkload
from stepscope.bench.workloads.building_blocks import in_batches, in_sizes

# DCGAN: a generator learns to draw discs from a discriminator that tells them from real ones.
#
# Neither loss falls for good in this game: each net's gain is the other's loss. The step returns
# how far the mean of the generated images is from the mean of the real ones (root of the mean
# square over pixels). It falls only when the discriminator teaches the generator something.


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
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * widths[-1], 1))
        initialize(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(images)
        return scores


def doublings(config: Config) -> int:
    """Return how often 4x4 pixels are doubled to make the image."""
    return int(math.log2(config.image // 4))


def initialize(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            nn.init.normal_(layer.weight, std=0.02)
        elif isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight, mean=1.0, std=0.02)


@in_batches
def make_discs(config: Config, draw: torch.Generator) -> Iterator[torch.Tensor]:
    """A bright disc near the middle of a dark image, from -1 to 1: size and colours vary."""
    columns = torch.linspace(-1, 1, config.image, device=draw.device)

    def between(low: float, high: float, channels: int = 1) -> torch.Tensor:
        shape = (config.batch, channels, 1, 1)
        return low + (high - low) * torch.rand(shape, generator=draw, device=draw.device)

    while True:
        right, down = columns - between(-0.3, 0.3), columns[:, None] - between(-0.3, 0.3)
        inside = ((between(0.4, 0.7) - (right**2 + down**2).sqrt()) * 10).sigmoid()
        bright, dark = between(0.2, 1.0, channels=3), between(-1.0, -0.6, channels=3)
        yield dark + (bright - dark) * inside


def distance_of_means(real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    difference = real.detach().mean(0) - fake.detach().float().mean(0)
    return difference.square().mean().sqrt()


def make_adams(
    config: Config, models: tuple[nn.Module, ...], betas: tuple[float, float]
) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr=config.lr, betas=betas) for model in models]


def build_dcgan(config: Config, place: TrainingPlace) -> Step:
    bare_discriminator = DCGANDiscriminator(config)
    generator, discriminator = place.put(DCGANGenerator(config)), place.put(bare_discriminator)
    optimizers = make_adams(config, (generator, discriminator), (0.5, 0.999))
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
        bare_discriminator.requires_grad_(False)  # it only passes gradients on to the generator
        loss(bare_discriminator(fake), real_label).backward()
        bare_discriminator.requires_grad_(True)
        optimizers[0].step()
        return distance_of_means(real, fake)

    return step


# An image has four times a power of two pixels a side.
DCGAN = {"batch": 128, "batches": 4, "image": 64, "noise": 100, "width": 128, "lr": 2e-4}
DCGAN_WORKLOAD = TrainingWorkload(
    name="dcgan",
    task="image generation",
    source="Radford et al., Unsupervised Representation Learning with DCGANs, 2016",
    samples="images",
    sizes=in_sizes(
        DCGAN,
        tiny={"batch": 16, "image": 16, "width": 8, "noise": 16, "lr": 4e-3},
        small={"width": 64},
    ),
    targets={"tiny": Target(0.5, 70), "small": Target(0.52, 60), "paper": Target(0.52, 60)},
    build=build_dcgan,
    tags=frozenset({"convolutional", "adversarial"}),
)


# WGAN-GP: a generator against a critic whose gradient is held near one by a penalty.
#
# The critic's loss falls and rises as the two learn in turns. The step returns how far the mean of
# the generated images is from the mean of the real ones (root of the mean square over pixels): up
# to a constant, a lower bound of the Wasserstein distance that the critic estimates.

PENALTY_WEIGHT = 10.0


class ResidualImages(nn.Module):
    """Two convolutions after a norm each, beside a shortcut."""

    def __init__(self, inputs: int, middle: int, outputs: int, norms: list[nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)
        self.first = nn.Conv2d(inputs, middle, 3, padding=1, bias=False)
        self.second = nn.Conv2d(middle, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)


class GrowingBlock(ResidualImages):
    """Residual block of the generator: doubles the image."""

    def __init__(self, inputs: int, outputs: int) -> None:
        norms = [nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)]
        super().__init__(inputs, outputs, outputs, norms)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(double(functional.relu(self.norms[0](x))))
        y = self.second(functional.relu(self.norms[1](y)))
        return y + self.shortcut(double(x))


class ShrinkingBlock(ResidualImages):
    """Residual block of the critic: halves the image. Its norms see one sample each, because the
    penalty is on the gradient of each sample."""

    def __init__(self, inputs: int, outputs: int) -> None:
        norms = [nn.GroupNorm(1, inputs), nn.GroupNorm(1, inputs)]
        super().__init__(inputs, inputs, outputs, norms)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(functional.relu(self.norms[0](x)))
        y = self.second(functional.relu(self.norms[1](y)))
        return functional.avg_pool2d(y, 2) + self.shortcut(functional.avg_pool2d(x, 2))


class WGANGenerator(nn.Module):
    """Noise to 4x4 pixels, then blocks that each double the image: four make 64x64."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, widths = config.width, channels(config)
        self.first = nn.Linear(config.noise, 16 * widths[-1])
        pairs = itertools.pairwise(reversed(widths))
        self.blocks = nn.Sequential(*(GrowingBlock(*pair) for pair in pairs))
        self.last = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 3, 3, padding=1), nn.Tanh()
        )

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.last(self.blocks(self.first(noise).unflatten(1, (-1, 4, 4))))
        return x


class WGANCritic(nn.Module):
    """Blocks down to 4x4 pixels, then one score without bounds."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        widths = channels(config)
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = itertools.pairwise(widths)
        self.blocks = nn.Sequential(*(ShrinkingBlock(*pair) for pair in pairs))
        self.last = nn.Linear(16 * widths[-1], 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.blocks(self.first(images)).flatten(1))
        return scores


def channels(config: Config) -> list[int]:
    """From the whole image, twice as many at each halving, at most eight times the width."""
    return [config.width * min(1 << halvings, 8) for halvings in range(doublings(config) + 1)]


def double(x: torch.Tensor) -> torch.Tensor:
    return functional.interpolate(x, scale_factor=2.0, mode="nearest")


def gradient_penalty(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Return how far the critic's gradient is from length one at random points between the images.

    It calls forward() itself: torch.compile, where the critic is compiled, has no second backward.
    """
    share = torch.rand((len(real), 1, 1, 1), device=real.device)
    between = (real + share * (fake - real)).requires_grad_()
    (gradient,) = torch.autograd.grad(critic.forward(between).sum(), between, create_graph=True)
    return (gradient.float().flatten(1).norm(dim=1) - 1).square().mean()


def build_wgan_gp(config: Config, place: TrainingPlace) -> Step:
    bare_critic = WGANCritic(config)
    generator, critic = place.put(WGANGenerator(config)), place.put(bare_critic)
    optimizers = make_adams(config, (generator, critic), (0.0, 0.9))
    batches = make_discs(config, place)

    def generate() -> torch.Tensor:
        noise = torch.randn((config.batch, config.noise), device=place.device)
        fake: torch.Tensor = generator(noise)
        return fake

    def train_critic(real: torch.Tensor) -> None:
        with torch.no_grad():
            fake = generate().float()
        real_scores, fake_scores = critic(torch.cat((real, fake))).float().chunk(2)
        penalty = gradient_penalty(bare_critic, real, fake)
        optimizers[1].zero_grad()
        (fake_scores.mean() - real_scores.mean() + PENALTY_WEIGHT * penalty).backward()
        optimizers[1].step()

    def step(number: int) -> torch.Tensor:
        for turn in range(config.critic_steps):
            real = batches[(number * config.critic_steps + turn) % len(batches)]
            train_critic(real)
        bare_critic.requires_grad_(False)  # it only passes gradients on to the generator
        fake = generate()
        optimizers[0].zero_grad()
        (-bare_critic(fake).float().mean()).backward()
        bare_critic.requires_grad_(True)
        optimizers[0].step()
        return distance_of_means(real, fake)

    return step


# The critic takes `critic_steps` steps for one of the generator.
WGAN_GP = {
    "batch": 64, "batches": 4, "image": 64, "noise": 128, "width": 64, "critic_steps": 5,
    "lr": 1e-4,
}  # fmt: skip
WGAN_GP_TINY = {
    "batch": 8, "image": 16, "width": 4, "noise": 16, "critic_steps": 2, "lr": 3e-3,
}  # fmt: skip
WGAN_GP_WORKLOAD = TrainingWorkload(
    name="wgan-gp",
    task="image generation",
    source="Gulrajani et al., Improved Training of Wasserstein GANs, 2017 (64x64 residual nets)",
    samples="images",
    sizes=in_sizes(WGAN_GP, tiny=WGAN_GP_TINY, small={"batch": 32}),
    targets={"tiny": Target(0.4, 30), "small": Target(0.52, 60), "paper": Target(0.52, 60)},
    build=build_wgan_gp,
    tags=frozenset({"convolutional", "adversarial"}),
)
