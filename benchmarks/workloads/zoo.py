"""Small models of many kinds, to record and to predict: name -> a training step on a device.

`build(name, device, batch)` gives the modules whose parameters are trained, one optimizer group for
each, and a function that runs forward and backward once for the batch it holds.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    Loss = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """`passes` are run one after the other, each with its own optimizer's step behind it."""

    modules: tuple[nn.Module, ...]
    passes: tuple[Loss, ...]


BATCHES = {
    "bert": 16,
    "resnet": 32,
    "mobile": 32,
    "unet": 8,
    "nano": 16,
    "dcgan": 64,
    "moe": 8,
    "lstm": 32,
}


def build(name: str, device: str, batch: int | None = None) -> Workload:
    torch.manual_seed(0)
    maker: Callable[[str, int], Workload] = globals()[f"_{name}"]
    return maker(device, batch or BATCHES[name])


def _classifier(model: nn.Module, x: torch.Tensor, classes: int) -> Workload:
    model.to(x.device)
    y = torch.randint(0, classes, (len(x),), device=x.device)
    return Workload((model,), (lambda: functional.cross_entropy(model(x), y),))


class _Encoder(nn.Module):
    def __init__(self, layers: int, width: int, words: int, length: int, *, causal: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, causal=causal) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _Block(nn.Module):
    def __init__(self, width: int, *, causal: bool, feed: nn.Module | None = None) -> None:
        super().__init__()
        self.heads, self.causal = width // 64, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = feed or nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.feed(self.norm2(x))


def _language(model: nn.Module, device: str, batch: int, words: int, length: int) -> Workload:
    model.to(device)
    ids = torch.randint(0, words, (batch, length + 1), device=device)

    def loss() -> torch.Tensor:
        logits = model(ids[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return Workload((model,), (loss,))


def _bert(device: str, batch: int) -> Workload:
    return _language(_Encoder(8, 512, 8192, 256, causal=False), device, batch, 8192, 256)


def _nano(device: str, batch: int) -> Workload:
    return _language(_Encoder(6, 384, 256, 256, causal=True), device, batch, 256, 256)


class _Residual(nn.Module):
    def __init__(self, inner: nn.Module, short: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.short = inner, short or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.inner(x) + self.short(x))


def _conv(a: int, b: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(a, b, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(b))


def _resnet(device: str, batch: int) -> Workload:
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
    return _classifier(model, torch.randn(batch, 3, 224, 224, device=device), 1000)


def _mobile(device: str, batch: int) -> Workload:
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
    return _classifier(model, torch.randn(batch, 3, 224, 224, device=device), 1000)


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


def _unet(device: str, batch: int) -> Workload:
    model = _Unet().to(device)
    x = torch.randn(batch, 3, 128, 128, device=device)
    y = torch.randint(0, 8, (batch, 128, 128), device=device)
    return Workload((model,), (lambda: functional.cross_entropy(model(x), y),))


def _dcgan(device: str, batch: int) -> Workload:
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


class _Experts(nn.Module):
    """Dense routing to fixed shares, so that no step waits for the device to tell sizes."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        flat = x.reshape(-1, w)
        scores = self.gate(flat).softmax(-1)
        share = len(flat) * 2 // scores.shape[1]
        weight, chosen = scores.t().topk(share, dim=1)
        taken = flat[chosen.flatten()].view(scores.shape[1], share, w)
        made = torch.bmm(functional.silu(torch.bmm(taken, self.up)), self.down)
        made = made * weight.unsqueeze(-1)
        out = torch.zeros_like(flat).to(made.dtype)
        return out.index_add(0, chosen.flatten(), made.flatten(0, 1)).view(b, t, w).to(x.dtype)


def _moe(device: str, batch: int) -> Workload:
    model = _Encoder(8, 512, 8192, 256, causal=True)
    for number in range(1, 8, 2):
        model.blocks[number] = _Block(512, causal=True, feed=_Experts(512, 8))
    return _language(model, device, batch, 8192, 256)


class _Recurrent(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.lstm = nn.LSTM(width, width, num_layers=3, batch_first=True)
        self.cell = nn.GRUCell(width, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.words(ids))
        state = x[:, 0]
        out = []
        for place in range(x.shape[1] // 4):  # a loop in Python, as decoders have them
            state = self.cell(x[:, place], state)
            out.append(state)
        return self.head(torch.cat((torch.stack(out, 1), x[:, len(out) :]), 1))


def _lstm(device: str, batch: int) -> Workload:
    return _language(_Recurrent(4096, 512), device, batch, 4096, 128)


def parameters(modules: tuple[nn.Module, ...]) -> list[list[Any]]:
    return [list(module.parameters()) for module in modules]
