"""Rows of tables: clicks (DLRM), ratings (NeuMF), residual layers over numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from stepscope.bench.workload import Config, Target, TrainingWorkload
from stepscope.bench.workloads.building_blocks import (
    Labelled,
    in_batches,
    in_sizes,
    stacked,
    train_on,
)
from stepscope.bench.workloads.graphs_and_points import labels_loss

# DLRM: is the advertisement clicked? It follows from some of the numbers and of the categories.

NUMBERS = 13
CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


def table_rows(config: Config) -> list[int]:
    return [min(rows, config.most_rows) for rows in CRITEO_ROWS]


def perceptron(*widths: int) -> nn.Module:
    """Return linear layers, each with a ReLU."""

    def layer(width: int, out: int) -> tuple[nn.Module, ...]:
        linear = nn.Linear(width, out)
        nn.init.xavier_normal_(linear.weight)
        return linear, nn.ReLU()

    return stacked(widths, layer)


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


@in_batches
def make_clicks(config: Config, draw: torch.Generator) -> Iterator[tuple[torch.Tensor, ...]]:
    """A click follows from three numbers and from whether three categories are odd or even."""
    device = draw.device
    rows = torch.tensor(table_rows(config), device=device)
    while True:
        numbers = torch.randn(config.batch, NUMBERS, generator=draw, device=device)
        shape = (config.batch, len(rows), config.ids)
        drawn = torch.rand(shape, generator=draw, device=device, dtype=torch.float64)
        ids = (rows[:, None] * drawn**4).long()  # a few are common, most are rare
        parity = (ids[:, (5, 8, 13), 0] % 2 * 2 - 1).sum(1)
        clicked = (numbers[:, 0] + numbers[:, 1] - numbers[:, 2] + 0.5 * parity > 0).float()
        yield numbers, ids, clicked


# Tables are cut to `most_rows`. A bag has so many `ids`: an advertisement's categories of one kind.
# `spread` is that of the embeddings at the start.
CRITEO_KAGGLE = {
    "batch": 2048, "batches": 8, "most_rows": max(CRITEO_ROWS), "ids": 1, "width": 16,
    "hidden": 512, "spread": 0.05, "lr": 0.01,
}  # fmt: skip
DLRM_SMALL = {"batch": 65_536, "most_rows": 1_000_000, "ids": 4}
DLRM_TINY = {"batch": 64, "most_rows": 1000, "ids": 4, "hidden": 128, "batches": 32}
DLRM_WORKLOAD = TrainingWorkload(
    name="dlrm",
    task="recommendation",
    source="Naumov et al., Deep Learning Recommendation Model, 2019; Criteo Kaggle (540 M)",
    samples="advertisements",
    sizes=in_sizes(CRITEO_KAGGLE, tiny=DLRM_TINY, small=DLRM_SMALL),
    targets={"tiny": Target(0.5, 60), "small": Target(0.65, 60), "paper": Target(0.65, 60)},
    build=train_on(make_clicks, DLRM, torch.optim.Adagrad, labels_loss),
    tags=frozenset({"recommendation"}),
)


# NeuMF: will this user take this movie? Users take the movies of their own taste.


class NeuMF(nn.Module):
    """Two models with embeddings of their own, a product and a perceptron, joined at the end."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        factors = config.factors
        # One table holds both models' embeddings of a row, side by side.
        self.users = nn.Embedding(config.users, 3 * factors)
        self.movies = nn.Embedding(config.movies, 3 * factors)
        for table in (self.users, self.movies):
            nn.init.normal_(table.weight, std=config.spread)
        self.layers = stacked(
            (4 * factors, 4 * factors, 2 * factors, factors),
            lambda width, out: (nn.Linear(width, out), nn.ReLU()),
        )
        self.score = nn.Linear(2 * factors, 1)
        self.factors = factors

    def forward(self, user: torch.Tensor, movie: torch.Tensor) -> torch.Tensor:
        parts = (self.factors, 2 * self.factors)
        user_product, user_deep = self.users(user).split(parts, 1)
        movie_product, movie_deep = self.movies(movie).split(parts, 1)
        deep = self.layers(torch.cat((user_deep, movie_deep), 1))
        joined = torch.cat((user_product * movie_product, deep), 1)
        scores: torch.Tensor = self.score(joined).squeeze(1)
        return scores


@in_batches
def make_ratings(config: Config, draw: torch.Generator) -> Iterator[tuple[torch.Tensor, ...]]:
    """A user's or movie's taste is its number's remainder; every fifth movie is of the user's."""
    device = draw.device
    while True:
        user = torch.randint(config.users, (config.batch,), generator=draw, device=device)
        movie = torch.randint(config.movies, (config.batch,), generator=draw, device=device)
        liked = movie - movie % config.tastes + user % config.tastes
        movie[::5] = liked[::5].remainder(config.movies)
        taken = (user % config.tastes == movie % config.tastes).float()
        yield user, movie, taken


MOVIELENS_20M = {
    "batch": 262_144, "batches": 4, "users": 138_493, "movies": 26_744, "tastes": 8, "factors": 64,
    "spread": 0.1, "lr": 5e-3,
}  # fmt: skip
NCF_TINY = {"batch": 2048, "users": 512, "movies": 256, "factors": 16, "lr": 2e-2}
NCF_WORKLOAD = TrainingWorkload(
    name="ncf",
    task="recommendation",
    source="He et al., Neural Collaborative Filtering, 2017; MovieLens 20M as in MLPerf 0.5",
    samples="ratings",
    sizes=in_sizes(MOVIELENS_20M, tiny=NCF_TINY, paper={"batch": 1_048_576}),
    targets={"tiny": Target(0.3, 60), "small": Target(0.6, 60), "paper": Target(0.6, 60)},
    build=train_on(make_ratings, NeuMF, loss=labels_loss),
    tags=frozenset({"recommendation"}),
)


# Residual layers over the rows of a table: nothing but linear layers, norms and dropout.


class RowBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.BatchNorm1d(width),
            nn.Linear(width, 2 * width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(2 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.path(x)


@in_batches
def make_table(config: Config, draw: torch.Generator) -> Iterator[Labelled]:
    """Rows of random numbers; the class is the largest of a few random sums of each row."""
    device, shape = draw.device, (config.batch, config.columns)
    sums = torch.randn((config.columns, config.classes), generator=draw, device=device)
    while True:
        rows = torch.randn(shape, generator=draw, device=device)
        yield rows, (rows @ sums).argmax(1)


def row_net(config: Config) -> nn.Module:
    blocks = [RowBlock(config.width) for _ in range(config.layers)]
    return nn.Sequential(
        nn.Linear(config.columns, config.width),
        *blocks,
        nn.BatchNorm1d(config.width),
        nn.Linear(config.width, config.classes),
    )


RTDL_RESNET = {
    "batch": 4096, "batches": 4, "columns": 200, "classes": 10, "width": 768, "layers": 12,
    "lr": 1e-3,
}  # fmt: skip
TABULAR_WORKLOAD = TrainingWorkload(
    name="tabular",
    task="classification of rows",
    source="Gorishniy et al., Revisiting Deep Learning Models for Tabular Data, 2021 (ResNet)",
    samples="rows",
    sizes=in_sizes(
        RTDL_RESNET,
        tiny={"batch": 64, "columns": 16, "width": 64, "layers": 3, "lr": 3e-3},
        paper={"width": 512, "layers": 8, "batch": 1024},
    ),
    targets={"tiny": Target(1.0, 60), "small": Target(1.5, 60), "paper": Target(1.5, 60)},
    build=train_on(make_table, row_net, torch.optim.AdamW),
    tags=frozenset({"extra"}),
)
