"""DLRM: is the advertisement clicked? It follows from some of the numbers and of the categories."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace

NUMBERS = 13
CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


def table_rows(config: Config) -> list[int]:
    return [min(rows, config.most_rows) for rows in CRITEO_ROWS]


def perceptron(*widths: int) -> nn.Sequential:
    """Every layer with a ReLU."""
    layers: list[nn.Module] = []
    for width, out in pairwise(widths):
        layer = nn.Linear(width, out)
        nn.init.xavier_normal_(layer.weight)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """Numbers and categories become vectors of one width; their dot products decide."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, hidden, vectors = config.width, config.hidden, len(CRITEO_ROWS) + 1
        # Gradients of the tables are dense: NCCL does not reduce sparse ones.
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum") for rows in table_rows(config)
        )
        for table in self.tables:
            nn.init.uniform_(table.weight, -config.spread, config.spread)
        self.bottom = perceptron(NUMBERS, hidden, hidden // 2, hidden // 8, width)
        pairs = torch.triu_indices(vectors, vectors, 1)
        self.register_buffer("pairs", pairs[0] * vectors + pairs[1], persistent=False)
        self.top = perceptron(width + self.pairs.numel(), hidden, hidden // 2)
        self.score = nn.Linear(hidden // 2, 1)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(numbers)
        sparse = [table(ids[:, at]).to(dense.dtype) for at, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *sparse], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        dots = products.index_select(1, self.pairs)
        scores: torch.Tensor = self.score(self.top(torch.cat((dense, dots), 1))).squeeze(1)
        return scores


def make_clicks(config: Config, place: TrainingPlace) -> list[tuple[torch.Tensor, ...]]:
    """A click follows from three numbers and from whether three categories are odd or even."""
    draw, device = place.generator(), place.device
    rows = torch.tensor(table_rows(config), device=device)
    clicks = []
    for _ in range(config.batches):
        numbers = torch.randn(config.batch, NUMBERS, generator=draw, device=device)
        shape = (config.batch, len(rows), config.ids)
        drawn = torch.rand(shape, generator=draw, device=device, dtype=torch.float64)
        ids = (rows[:, None] * drawn**4).long()  # a few are common, most are rare
        parity = (ids[:, (5, 8, 13), 0] % 2 * 2 - 1).sum(1)
        clicked = (numbers[:, 0] + numbers[:, 1] - numbers[:, 2] + 0.5 * parity > 0).float()
        clicks.append((numbers, ids, clicked))
    return clicks


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(DLRM(config))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=config.lr)
    clicks = make_clicks(config, place)

    def step(number: int) -> torch.Tensor:
        numbers, ids, clicked = clicks[number % len(clicks)]
        scores = model(numbers, ids).float()
        loss = functional.binary_cross_entropy_with_logits(scores, clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


CRITEO_KAGGLE = {
    "batch": 2048,
    "batches": 8,  # that training goes round
    "most_rows": max(CRITEO_ROWS),  # larger tables are cut to it
    "ids": 1,  # in a bag: an advertisement's categories of one kind
    "width": 16,
    "hidden": 512,
    "spread": 0.05,  # of the embeddings at the start
    "lr": 0.01,
}
SMALL = {"batch": 65_536, "most_rows": 1_000_000, "ids": 4}
TINY = {"batch": 64, "most_rows": 1000, "ids": 4, "hidden": 128, "batches": 32}
WORKLOAD = TrainingWorkload(
    name="dlrm",
    task="recommendation",
    source="Naumov et al., Deep Learning Recommendation Model, 2019; Criteo Kaggle (540 M)",
    samples="advertisements",
    sizes={
        "tiny": {**CRITEO_KAGGLE, **TINY},
        "small": {**CRITEO_KAGGLE, **SMALL},
        "paper": CRITEO_KAGGLE,
    },
    targets={
        "tiny": Target(loss=0.5, steps=60),
        "small": Target(loss=0.65, steps=60),
        "paper": Target(loss=0.65, steps=60),
    },
    build=build,
    tags=frozenset({"recommendation"}),
)
