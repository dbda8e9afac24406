"""Rows rather than images or words: a recommender, and messages along a graph's edges."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from workloads.zoo.workload import Workload, classifier


def _layers(*widths: int) -> nn.Sequential:
    made: list[nn.Module] = []
    for a, b in pairwise(widths):
        made += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*made)


class _Recommender(nn.Module):
    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width) for _ in range(tables))
        self.low = _layers(13, 512, 256, width)
        pairs = (tables + 1) * tables // 2
        self.high, self.last = _layers(width + pairs, 1024, 512, 256), nn.Linear(256, 1)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        low = self.low(numbers)
        found = [table(ids[i]) for i, table in enumerate(self.tables)]
        all_of = torch.stack([low, *(each.to(low.dtype) for each in found)], 1)
        met = torch.bmm(all_of, all_of.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.last(self.high(torch.cat((low, met), 1)))


def dlrm(device: str, batch: int) -> Workload:
    model = _Recommender(26, 20_000, 64).to(device)
    numbers = torch.randn(batch, 13, device=device)
    ids = torch.randint(0, 20_000, (26, batch, 4), device=device)
    clicked = torch.rand(batch, 1, device=device).round()

    def loss() -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(model(numbers, ids), clicked)

    return Workload((model,), (loss,))


class _Messages(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.theirs = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        sent = self.theirs(x)[edges[0]]
        got = torch.zeros_like(x).to(sent.dtype).index_add(0, edges[1], sent)
        return x + functional.relu(self.norm(self.own(x) + got))


def graph(device: str, batch: int) -> Workload:
    nodes = 4096 * batch
    layers = nn.ModuleList(_Messages(256) for _ in range(12)).to(device)
    head = nn.Linear(256, 16).to(device)
    x = torch.randn(nodes, 256, device=device)
    edges = torch.randint(0, nodes, (2, 8 * nodes), device=device)
    y = torch.randint(0, 16, (nodes,), device=device)

    def loss() -> torch.Tensor:
        seen = x
        for layer in layers:
            seen = layer(seen, edges)
        return functional.cross_entropy(head(seen), y)

    return Workload((nn.ModuleList([layers, head]),), (loss,))


class _Points(nn.Module):
    """Each point separately, then the maximum of each feature."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in pairwise((3, 64, 64, 64, 128, 1024)):
            layers += [nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()]
        self.each = nn.Sequential(*layers)
        self.all = nn.Sequential(_layers(1024, 512, 256), nn.Dropout(0.3), nn.Linear(256, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.all(self.each(x).amax(-1))


def points(device: str, batch: int) -> Workload:
    return classifier(_Points(40), torch.randn(batch, 3, 2048, device=device), 40)
