"""Recurrent networks and convolutions along time."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from workloads.zoo.workload import Workload, language


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
        for place in range(x.shape[1] // 4):  # a loop in Python, as in decoders
            state = self.cell(x[:, place], state)
            out.append(state)
        return self.head(torch.cat((torch.stack(out, 1), x[:, len(out) :]), 1))


def lstm(device: str, batch: int) -> Workload:
    return language(_Recurrent(4096, 512), device, batch, 4096, 128)


class _Seq2Seq(nn.Module):
    """A decoder that attends to the encoder at every word, in a loop."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(2 * width, words)
        self.encoder = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.cell, self.look = nn.LSTMCell(2 * width, width), nn.Linear(width, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        seen, (h, c) = self.encoder(x)
        state, told = (h[-1], c[-1]), seen[:, -1]
        out = []
        for place in range(x.shape[1]):
            state = self.cell(torch.cat((x[:, place], told), -1), state)
            weights = torch.bmm(seen, self.look(state[0]).unsqueeze(-1)).softmax(1)
            told = (weights.to(seen.dtype) * seen).sum(1)
            out.append(torch.cat((state[0], told), -1))
        return self.head(torch.stack(out, 1))


def seq2seq(device: str, batch: int) -> Workload:
    return language(_Seq2Seq(8192, 512), device, batch, 8192, 48)


class _Gated(nn.Module):
    def __init__(self, width: int, apart: int) -> None:
        super().__init__()
        self.both = nn.Conv1d(width, 2 * width, 2, dilation=apart)
        self.out, self.apart = nn.Conv1d(width, 2 * width, 1), apart

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self.both(functional.pad(x, (self.apart, 0))).chunk(2, 1)
        y, skip = self.out(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
        return x + y, skip


class _Wavenet(nn.Module):
    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        self.words = nn.Embedding(levels, width)
        self.layers = nn.ModuleList(_Gated(width, 2**i) for _ in range(2) for i in range(9))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU())
        self.last = nn.Conv1d(width, levels, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids).transpose(1, 2)
        total = torch.zeros_like(x)
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        return self.last(self.head(total)).transpose(1, 2)


def wavenet(device: str, batch: int) -> Workload:
    return language(_Wavenet(128, 256), device, batch, 256, 4096)


class _Conformer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        feed = lambda: nn.Sequential(  # noqa: E731
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.SiLU(),
            nn.Dropout(0.1),
            nn.Linear(4 * width, width),
        )
        self.feed1, self.feed2 = feed(), feed()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.look = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        self.point1, self.point2 = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.depth = nn.Conv1d(width, width, 31, 1, 15, groups=width)
        self.batch = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * self.feed1(x)
        y = self.norm1(x)
        x = x + self.look(y, y, y, need_weights=False)[0]
        y = functional.glu(self.point1(self.norm2(x).transpose(1, 2)), 1)
        y = self.point2(functional.silu(self.batch(self.depth(y))))
        x = x + y.transpose(1, 2)
        return self.norm3(x + 0.5 * self.feed2(x))


class _Speech(nn.Module):
    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.first = nn.Linear(80, width)
        self.blocks = nn.ModuleList(_Conformer(width, 4) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def conformer(device: str, batch: int) -> Workload:
    model = _Speech(8, 256, 512).to(device)
    x = torch.randn(batch, 400, 80, device=device)
    y = torch.randint(0, 512, (batch, 400), device=device)

    def loss() -> torch.Tensor:
        return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return Workload((model,), (loss,))
