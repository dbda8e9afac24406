"""Images: classifiers, a segmenter, a pair of adversaries."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional

from workloads.zoo.workload import Workload, classifier


class _Residual(nn.Module):
    def __init__(self, inner: nn.Module, short: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.short = inner, short or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.inner(x) + self.short(x))


def _conv(a: int, b: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(a, b, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(b))


def resnet(device: str, batch: int) -> Workload:
    layers: list[nn.Module] = [_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for out, count in ((256, 3), (512, 4), (1024, 6), (2048, 3)):
        for number in range(count):
            stride = 2 if number == 0 and out > 256 else 1
            inner = out // 4
            path = nn.Sequential(
                _conv(width, inner, 1),
                nn.ReLU(),
                _conv(inner, inner, 3, stride),
                nn.ReLU(),
                _conv(inner, out, 1),
            )
            short = _conv(width, out, 1, stride) if number == 0 else None
            layers.append(_Residual(path, short))
            width = out
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    return classifier(model, torch.randn(batch, 3, 224, 224, device=device), 1000)


def mobile(device: str, batch: int) -> Workload:
    layers: list[nn.Module] = [_conv(3, 32, 3, 2), nn.ReLU6()]
    width = 32
    for out, count, stride in ((16, 1, 1), (24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1)):
        for number in range(count):
            wide = width * 6
            path = nn.Sequential(
                _conv(width, wide, 1),
                nn.ReLU6(),
                _conv(wide, wide, 3, stride if number == 0 else 1, groups=wide),
                nn.ReLU6(),
                _conv(wide, out, 1),
            )
            layers.append(_Residual(path) if width == out and number else path)
            width = out
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 1000))
    return classifier(model, torch.randn(batch, 3, 224, 224, device=device), 1000)


class _Unet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        twice = lambda a, b: nn.Sequential(_conv(a, b), nn.ReLU(), _conv(b, b), nn.ReLU())  # noqa: E731
        pairs = list(zip((3, *widths), widths, strict=False))
        self.down = nn.ModuleList(twice(a, b) for a, b in pairs)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths)
        )
        self.join = nn.ModuleList(twice(2 * a, a) for a in widths[:-1])
        self.last = nn.Conv2d(widths[0], 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for number, down in enumerate(self.down):
            x = down(x if number == 0 else functional.max_pool2d(x, 2))
            kept.append(x)
        for up, join, skip in reversed(list(zip(self.up, self.join, kept[:-1], strict=True))):
            x = join(torch.cat((up(x), skip), 1))
        return self.last(x)


def unet(device: str, batch: int) -> Workload:
    model = _Unet().to(device)
    x = torch.randn(batch, 3, 128, 128, device=device)
    y = torch.randint(0, 8, (batch, 128, 128), device=device)
    return Workload((model,), (lambda: functional.cross_entropy(model(x), y),))


def dcgan(device: str, batch: int) -> Workload:
    def step(a: int, b: int, *, up: bool) -> list[nn.Module]:
        kind = nn.ConvTranspose2d if up else nn.Conv2d
        act: nn.Module = nn.ReLU() if up else nn.LeakyReLU(0.2)
        return [kind(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), act]

    first = [nn.ConvTranspose2d(100, 512, 4, 1, 0, bias=False), nn.BatchNorm2d(512), nn.ReLU()]
    ups = [layer for a in (512, 256, 128) for layer in step(a, a // 2, up=True)]
    maker = nn.Sequential(*first, *ups, nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()).to(device)
    downs = [layer for a in (64, 128, 256) for layer in step(a, a * 2, up=False)]
    judge = nn.Sequential(
        nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), *downs, nn.Conv2d(512, 1, 4), nn.Flatten()
    ).to(device)
    real = torch.randn(batch, 3, 64, 64, device=device)
    noise = torch.randn(batch, 100, 1, 1, device=device)
    score = functional.binary_cross_entropy_with_logits

    def judging() -> torch.Tensor:
        true, false = judge(real), judge(maker(noise).detach())
        return score(true, torch.ones_like(true)) + score(false, torch.zeros_like(false))

    def making() -> torch.Tensor:
        found = judge(maker(noise))
        return score(found, torch.ones_like(found))

    return Workload((judge, maker), (judging, making))


class _ConvNext(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth = nn.Conv2d(width, width, 7, 1, 3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(functional.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


def convnext(device: str, batch: int) -> Workload:
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4)]
    for number, (width, count) in enumerate(((96, 3), (192, 3), (384, 9), (768, 3))):
        if number:
            layers.append(nn.Conv2d(width // 2, width, 2, 2))
        layers += [_ConvNext(width) for _ in range(count)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(768, 1000))
    return classifier(model, torch.randn(batch, 3, 224, 224, device=device), 1000)


class _Dense(nn.Module):
    """Every layer takes the outputs of all layers before it."""

    def __init__(self, width: int, growth: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width + i * growth),
                nn.ReLU(),
                nn.Conv2d(width + i * growth, 4 * growth, 1, bias=False),
                nn.BatchNorm2d(4 * growth),
                nn.ReLU(),
                nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False),
            )
            for i in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(layer(torch.cat(seen, 1)))
        return torch.cat(seen, 1)


def densenet(device: str, batch: int) -> Workload:
    layers: list[nn.Module] = [_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for number, count in enumerate((6, 12, 24, 16)):
        if number:
            layers += [nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            width //= 2
        layers.append(_Dense(width, 32, count))
        width += 32 * count
    model = nn.Sequential(
        *layers,
        nn.BatchNorm2d(width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 1000),
    )
    return classifier(model, torch.randn(batch, 3, 224, 224, device=device), 1000)


class _Diffused(nn.Module):
    """A residual block that also takes the noise level; some attend to all positions."""

    def __init__(self, a: int, b: int, told: int, *, looks: bool) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, a), nn.Conv2d(a, b, 3, 1, 1)
        self.norm2, self.conv2 = nn.GroupNorm(8, b), nn.Conv2d(b, b, 3, 1, 1)
        self.told, self.short = nn.Linear(told, b), nn.Conv2d(a, b, 1)
        self.look = nn.MultiheadAttention(b, 4, batch_first=True) if looks else None

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        y = self.conv1(functional.silu(self.norm1(x))) + self.told(noise)[:, :, None, None]
        y = self.conv2(functional.silu(self.norm2(y))) + self.short(x)
        if self.look is not None:
            flat = y.flatten(2).transpose(1, 2)
            seen, _ = self.look(flat, flat, flat, need_weights=False)
            y = y + seen.transpose(1, 2).reshape(y.shape)
        return y


class _Diffusion(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (64, 128, 256), told: int = 256) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, widths[0], 3, 1, 1), nn.Conv2d(widths[0], 3, 3, 1, 1)
        self.told = nn.Sequential(nn.Linear(1, told), nn.SiLU(), nn.Linear(told, told))
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for a, b in zip((widths[0], *widths), widths, strict=False):
            deep = b == widths[-1]
            self.down.append(_Diffused(a, b, told, looks=deep))
            self.up.insert(0, _Diffused(2 * b, a, told, looks=deep))

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        told = self.told(noise)
        x = self.first(x)
        kept = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else functional.avg_pool2d(x, 2), told)
            kept.append(x)
        for number, block in enumerate(self.up):
            x = block(torch.cat((x, kept.pop()), 1), told)
            if number + 1 < len(self.up):
                x = functional.interpolate(x, scale_factor=2.0)
        return self.last(x)


def diffusion(device: str, batch: int) -> Workload:
    model = _Diffusion().to(device)
    x, true = (torch.randn(batch, 3, 64, 64, device=device) for _ in range(2))
    noise = torch.rand(batch, 1, device=device)
    return Workload((model,), (lambda: functional.mse_loss(model(x, noise), true),))


class _Variational(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256), told: int = 128) -> None:
        super().__init__()
        pairs = list(zip((3, *widths), widths, strict=False))
        self.down = nn.Sequential(
            *(nn.Sequential(_conv(a, b, 3, 2), nn.LeakyReLU()) for a, b in pairs)
        )
        self.mean, self.spread = (nn.Linear(widths[-1] * 64, told) for _ in range(2))
        self.back = nn.Linear(told, widths[-1] * 64)
        self.up = nn.Sequential(
            *(
                nn.Sequential(nn.Upsample(scale_factor=2), _conv(b, a if a > 3 else 16), nn.SiLU())
                for a, b in reversed(pairs)
            ),
            nn.Conv2d(16, 3, 3, 1, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(x)
        mean, spread = self.mean(y.flatten(1)), self.spread(y.flatten(1))
        drawn = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        made = self.up(self.back(drawn).view(y.shape))
        apart = -0.5 * (1 + spread - mean**2 - spread.exp()).sum(1).mean()
        return functional.mse_loss(made, x) + 1e-3 * apart


def vae(device: str, batch: int) -> Workload:
    model = _Variational().to(device)
    x = torch.randn(batch, 3, 128, 128, device=device)
    return Workload((model,), (lambda: model(x),))
