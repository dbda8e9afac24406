"""Encoders, decoders and mixtures of experts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from workloads.zoo.workload import Workload, classifier, language


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


def bert(device: str, batch: int) -> Workload:
    return language(_Encoder(8, 512, 8192, 256, causal=False), device, batch, 8192, 256)


def nano(device: str, batch: int) -> Workload:
    return language(_Encoder(6, 384, 256, 256, causal=True), device, batch, 256, 256)


class _Experts(nn.Module):
    """Dense routing to fixed shares, so that no step waits for sizes from the device."""

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


def moe(device: str, batch: int) -> Workload:
    model = _Encoder(8, 512, 8192, 256, causal=True)
    for number in range(1, 8, 2):
        model.blocks[number] = _Block(512, causal=True, feed=_Experts(512, 8))
    return language(model, device, batch, 8192, 256)


def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class _Llama(nn.Module):
    """Rotated queries and keys, fewer keys than queries, a gated feed-forward."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, shared * self.size, bias=False)
        self.v = nn.Linear(width, shared * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        wide = width * 8 // 3
        self.gate, self.up = nn.Linear(width, wide, bias=False), nn.Linear(width, wide, bias=False)
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        y = self.norm1(x)
        q = _turned(self.q(y).view(b, t, self.heads, self.size).transpose(1, 2), angles)
        k = _turned(self.k(y).view(b, t, self.shared, self.size).transpose(1, 2), angles)
        v = self.v(y).view(b, t, self.shared, self.size).transpose(1, 2)
        many = self.heads // self.shared
        k, v = k.repeat_interleave(many, 1), v.repeat_interleave(many, 1)
        y = functional.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class _LlamaModel(nn.Module):
    def __init__(self, layers: int, width: int, words: int, length: int) -> None:
        super().__init__()
        heads = width // 64
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.blocks = nn.ModuleList(_Llama(width, heads, heads // 3) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        rates = 1e4 ** (-torch.arange(32) / 32.0)
        self.register_buffer("angles", torch.arange(length)[:, None] * rates)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, self.angles)
        return self.head(self.norm(x))


def llama(device: str, batch: int) -> Workload:
    return language(_LlamaModel(10, 768, 16384, 512), device, batch, 16384, 512)


class _Attention(nn.Module):
    """Explicit attention with a learned bias of distances."""

    def __init__(self, width: int, heads: int, length: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.bias = nn.Parameter(torch.zeros(heads, length, length))
        hidden = torch.full((length, length), -1e4).triu(1) if causal else torch.zeros(1)
        self.register_buffer("hidden", hidden)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = (
            layer(y).view(b, y.shape[1], self.heads, -1).transpose(1, 2)
            for layer, y in ((self.q, x), (self.k, seen), (self.v, seen))
        )
        scores = q @ k.transpose(-1, -2) + self.bias + self.hidden
        weights = functional.dropout(scores.softmax(-1), 0.1, self.training)
        return self.out((weights.to(v.dtype) @ v).transpose(1, 2).reshape(b, t, w))


class _T5Block(nn.Module):
    def __init__(self, width: int, length: int, *, decodes: bool) -> None:
        super().__init__()
        heads = width // 64
        self.own = _Attention(width, heads, length, causal=decodes)
        self.cross = _Attention(width, heads, length, causal=False) if decodes else None
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.own(y, y)
        if self.cross is not None and seen is not None:
            x = x + self.cross(self.norms[1](x), seen)
        return x + self.down(functional.relu(self.up(self.norms[2](x))))


class _T5(nn.Module):
    def __init__(self, layers: int, width: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.blocks = nn.ModuleList(_T5Block(width, length, decodes=False) for _ in range(layers))
        self.decoders = nn.ModuleList(_T5Block(width, length, decodes=True) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = y = self.words(ids)
        for block in self.blocks:
            x = block(x)
        for block in self.decoders:
            y = block(y, x)
        return self.head(y)


def t5(device: str, batch: int) -> Workload:
    return language(_T5(5, 512, 8192, 256), device, batch, 8192, 256)


class _MixerBlock(nn.Module):
    def __init__(self, width: int, places: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.along = nn.Sequential(nn.Linear(places, 256), nn.GELU(), nn.Linear(256, places))
        self.across = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.along(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.across(self.norm2(x))


class _Mixer(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.ModuleList(_MixerBlock(width, 196) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def mixer(device: str, batch: int) -> Workload:
    return classifier(_Mixer(12, 512), torch.randn(batch, 3, 224, 224, device=device), 1000)


class _Window(nn.Module):
    """Attention inside windows of an image, in every second block between neighbours."""

    def __init__(self, width: int, side: int, window: int, *, shifted: bool) -> None:
        super().__init__()
        self.side, self.window, self.heads = side, window, width // 32
        self.shift = window // 2 if shifted else 0
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(self.heads, window**2, window**2))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, _, w = x.shape
        many, size = self.side // self.window, self.window
        y = self.norm1(x).view(b, self.side, self.side, w)
        y = y.roll((-self.shift, -self.shift), (1, 2)) if self.shift else y
        y = y.view(b, many, size, many, size, w).transpose(2, 3).reshape(-1, size * size, w)
        q, k, v = self.qkv(y).view(len(y), size * size, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + self.bias
        y = (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(len(y), size * size, w)
        y = self.out(y).view(b, many, many, size, size, w).transpose(2, 3)
        y = y.reshape(b, self.side, self.side, w)
        y = y.roll((self.shift, self.shift), (1, 2)) if self.shift else y
        x = x + y.reshape(b, -1, w)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class _Windows(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (96, 192, 384), side: int = 56) -> None:
        super().__init__()
        self.cut, self.blocks, self.merge = nn.Conv2d(3, widths[0], 4, 4), nn.ModuleList(), {}
        joins = []
        for number, width in enumerate(widths):
            if number:
                joins.append(nn.Linear(2 * width, width, bias=False))
                self.merge[len(self.blocks)] = number - 1
            for block in range(4):
                here = side // 2**number
                self.blocks.append(_Window(width, here, 7, shifted=block % 2 == 1))
        self.joins = nn.ModuleList(joins)
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2)
        for number, block in enumerate(self.blocks):
            if number in self.merge:
                b, places, w = x.shape
                side = round(places**0.5) // 2
                x = x.view(b, side, 2, side, 2, w).transpose(2, 3).reshape(b, side * side, 4 * w)
                x = self.joins[self.merge[number]](x)
            x = block(x)
        return self.head(self.norm(x).mean(1))


def swin(device: str, batch: int) -> Workload:
    return classifier(_Windows(), torch.randn(batch, 3, 224, 224, device=device), 1000)
