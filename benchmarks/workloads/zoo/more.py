"""Models that nothing was fitted to: attention in other forms, gates, volumes, rows."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from workloads.zoo.workload import Workload, classifier, language


class _Squeezed(nn.Module):
    """A depthwise convolution whose channels are weighted by their means."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        wide = 4 * a
        self.grow = nn.Sequential(
            nn.Conv2d(a, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(),
            nn.Conv2d(wide, wide, 5, stride, 2, groups=wide, bias=False), nn.BatchNorm2d(wide),
            nn.SiLU(),
        )  # fmt: skip
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, wide // 16, 1), nn.SiLU(),
            nn.Conv2d(wide // 16, wide, 1), nn.Sigmoid(),
        )  # fmt: skip
        self.shrink = nn.Sequential(nn.Conv2d(wide, b, 1, bias=False), nn.BatchNorm2d(b))
        self.same = a == b and stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.grow(x)
        y = self.shrink(y * self.gate(y))
        return x + y if self.same else y


def efficient(device: str, batch: int) -> Workload:
    blocks: list[nn.Module] = []
    width = 24
    for out, count in ((24, 2), (48, 4), (96, 4), (192, 4)):
        for number in range(count):
            blocks.append(_Squeezed(width, out, 2 if number == 0 and out > 24 else 1))
            width = out
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.SiLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(192, 1000),
    )  # fmt: skip
    return classifier(model, torch.randn(batch, 3, 192, 192, device=device), 1000)


def volumes(device: str, batch: int) -> Workload:
    """Clips of 16 frames, convolved in space and time."""
    layers: list[nn.Module] = []
    for a, b in ((3, 32), (32, 64), (64, 128), (128, 256)):
        layers += [
            nn.Conv3d(a, b, 3, padding=1), nn.BatchNorm3d(b), nn.ReLU(),
            nn.Conv3d(b, b, 3, padding=1), nn.BatchNorm3d(b), nn.ReLU(), nn.MaxPool3d(2),
        ]  # fmt: skip
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(256, 400))
    return classifier(model, torch.randn(batch, 3, 16, 96, 96, device=device), 400)


class _Detector(nn.Module):
    """A hundred queries about an image's features, with torch's own transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 64, 7, 4, 3), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(128, width, 3, 2, 1),
        )  # fmt: skip
        self.places = nn.Parameter(torch.randn(1, 256, width))
        self.asked = nn.Parameter(torch.randn(100, width))
        self.transformer = nn.Transformer(
            width, 8, num_encoder_layers=4, num_decoder_layers=4, dim_feedforward=1024,
            batch_first=True,
        )  # fmt: skip
        self.kinds, self.boxes = nn.Linear(width, 92), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self.image(x).flatten(2).transpose(1, 2) + self.places
        found = self.transformer(seen, self.asked.expand(len(x), -1, -1))
        return self.kinds(found), self.boxes(found).sigmoid()


def detector(device: str, batch: int) -> Workload:
    model = _Detector(256).to(device)
    x = torch.randn(batch, 3, 256, 256, device=device)
    kinds = torch.randint(0, 92, (batch, 100), device=device)
    boxes = torch.rand(batch, 100, 4, device=device)

    def loss() -> torch.Tensor:
        said, at = model(x)
        wrong = functional.cross_entropy(said.transpose(1, 2), kinds)
        return wrong + functional.l1_loss(at.float(), boxes)

    return Workload((model,), (loss,))


class _Linear(nn.Module):
    """Attention without a softmax: running sums of keys times values, over chunks."""

    def __init__(self, width: int, heads: int, chunk: int = 64) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkvg, self.out = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        parts = self.qkvg(self.norm1(x)).view(b, t // self.chunk, self.chunk, 4, self.heads, -1)
        q, k, v, gate = parts.permute(3, 0, 4, 1, 2, 5)
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
        sums = torch.einsum("bhcik,bhciv->bhckv", k, v)
        before = sums.cumsum(2) - sums
        inside = (q @ k.transpose(-1, -2)).tril() @ v
        y = (q @ before + inside) * gate.sigmoid()
        x = x + self.out(y.permute(0, 2, 3, 1, 4).reshape(b, t, w))
        return x + self.down(functional.relu(self.up(self.norm2(x))).square())


class _LinearModel(nn.Module):
    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.blocks = nn.ModuleList(_Linear(width, 8) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def linear(device: str, batch: int) -> Workload:
    return language(_LinearModel(8, 512, 16384), device, batch, 16384, 1024)


class _Reader(nn.Module):
    """Lines of text: convolutions, then recurrence along the line."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b, pool in ((1, 64, 2), (64, 128, 2), (128, 256, (2, 1)), (256, 256, (4, 1))):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
            layers.append(nn.MaxPool2d(pool))
        self.seen = nn.Sequential(*layers)
        self.along = nn.GRU(256, 256, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(512, letters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.seen(x).squeeze(2).transpose(1, 2)
        return self.head(self.along(seen)[0])


def reader(device: str, batch: int) -> Workload:
    model = _Reader(96).to(device)
    x = torch.randn(batch, 1, 32, 320, device=device)
    written = torch.randint(0, 96, (batch, 80), device=device)

    def loss() -> torch.Tensor:
        return functional.cross_entropy(model(x).transpose(1, 2), written)

    return Workload((model,), (loss,))


class _Rows(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(2 * width, width), nn.Dropout(0.1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def rows(device: str, batch: int) -> Workload:
    layers = [_Rows(768) for _ in range(12)]
    model = nn.Sequential(nn.Linear(200, 768), *layers, nn.BatchNorm1d(768), nn.Linear(768, 10))
    return classifier(model, torch.randn(batch, 200, device=device), 10)
