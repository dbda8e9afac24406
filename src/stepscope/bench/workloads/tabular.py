"""Rows of tables: clicks (DLRM), ratings (NeuMF), residual layers over numbers."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Config, Step, Target, TrainingPlace, TrainingWorkload, descend
from stepscope.bench.workloads.image_classifiers import train_classifier

# DLRM: is the advertisement clicked? It follows from some of the numbers and of the categories.

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


def build_dlrm(config: Config, place: TrainingPlace) -> Step:
    model = place.put(DLRM(config))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=config.lr)
    clicks = make_clicks(config, place)

    def step(number: int) -> torch.Tensor:
        numbers, ids, clicked = clicks[number % len(clicks)]
        scores = model(numbers, ids).float()
        loss = functional.binary_cross_entropy_with_logits(scores, clicked)
        return descend(optimizer, loss)

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
DLRM_SMALL = {"batch": 65_536, "most_rows": 1_000_000, "ids": 4}
DLRM_TINY = {"batch": 64, "most_rows": 1000, "ids": 4, "hidden": 128, "batches": 32}
DLRM_WORKLOAD = TrainingWorkload(
    name="dlrm",
    task="recommendation",
    source="Naumov et al., Deep Learning Recommendation Model, 2019; Criteo Kaggle (540 M)",
    samples="advertisements",
    sizes={
        "tiny": {**CRITEO_KAGGLE, **DLRM_TINY},
        "small": {**CRITEO_KAGGLE, **DLRM_SMALL},
        "paper": CRITEO_KAGGLE,
    },
    targets={
        "tiny": Target(loss=0.5, steps=60),
        "small": Target(loss=0.65, steps=60),
        "paper": Target(loss=0.65, steps=60),
    },
    build=build_dlrm,
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
        layers: list[nn.Module] = []
        for width, out in pairwise((4 * factors, 4 * factors, 2 * factors, factors)):
            layers += [nn.Linear(width, out), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
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


def make_ratings(config: Config, place: TrainingPlace) -> list[tuple[torch.Tensor, ...]]:
    """A user's or movie's taste is its number's remainder; every fifth movie is of the user's."""
    draw, device = place.generator(), place.device
    ratings = []
    for _ in range(config.batches):
        user = torch.randint(config.users, (config.batch,), generator=draw, device=device)
        movie = torch.randint(config.movies, (config.batch,), generator=draw, device=device)
        liked = movie - movie % config.tastes + user % config.tastes
        movie[::5] = liked[::5].remainder(config.movies)
        taken = (user % config.tastes == movie % config.tastes).float()
        ratings.append((user, movie, taken))
    return ratings


def build_ncf(config: Config, place: TrainingPlace) -> Step:
    model = place.put(NeuMF(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    ratings = make_ratings(config, place)

    def step(number: int) -> torch.Tensor:
        user, movie, taken = ratings[number % len(ratings)]
        scores = model(user, movie).float()
        loss = functional.binary_cross_entropy_with_logits(scores, taken)
        return descend(optimizer, loss)

    return step


MOVIELENS_20M = {
    "batch": 262_144,
    "batches": 4,  # that training goes round
    "users": 138_493,
    "movies": 26_744,
    "tastes": 8,
    "factors": 64,
    "spread": 0.1,  # of the embeddings at the start
    "lr": 5e-3,
}
NCF_TINY = {"batch": 2048, "users": 512, "movies": 256, "factors": 16, "lr": 2e-2}
NCF_WORKLOAD = TrainingWorkload(
    name="ncf",
    task="recommendation",
    source="He et al., Neural Collaborative Filtering, 2017; MovieLens 20M as in MLPerf 0.5",
    samples="ratings",
    sizes={
        "tiny": {**MOVIELENS_20M, **NCF_TINY},
        "small": MOVIELENS_20M,
        "paper": {**MOVIELENS_20M, "batch": 1_048_576},
    },
    targets={
        "tiny": Target(loss=0.3, steps=60),
        "small": Target(loss=0.6, steps=60),
        "paper": Target(loss=0.6, steps=60),
    },
    build=build_ncf,
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


def make_table(config: Config, place: TrainingPlace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of random numbers; the class is the largest of a few random sums of each row."""
    draw, device = place.generator(), place.device
    sums = torch.randn((config.columns, config.classes), generator=draw, device=device)
    shape = (config.batch, config.columns)
    tables = [torch.randn(shape, generator=draw, device=device) for _ in range(config.batches)]
    return [(rows, (rows @ sums).argmax(1)) for rows in tables]


def build_tabular(config: Config, place: TrainingPlace) -> Step:
    blocks = [RowBlock(config.width) for _ in range(config.layers)]
    model = place.put(
        nn.Sequential(
            nn.Linear(config.columns, config.width),
            *blocks,
            nn.BatchNorm1d(config.width),
            nn.Linear(config.width, config.classes),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    return train_classifier(model, optimizer, make_table(config, place))


RTDL_RESNET = {
    "batch": 4096,
    "batches": 4,
    "columns": 200,
    "classes": 10,
    "width": 768,
    "layers": 12,
    "lr": 1e-3,
}
TABULAR_WORKLOAD = TrainingWorkload(
    name="tabular",
    task="classification of rows",
    source="Gorishniy et al., Revisiting Deep Learning Models for Tabular Data, 2021 (ResNet)",
    samples="rows",
    sizes={
        "tiny": {**RTDL_RESNET, "batch": 64, "columns": 16, "width": 64, "layers": 3, "lr": 3e-3},
        "small": RTDL_RESNET,
        "paper": {**RTDL_RESNET, "width": 512, "layers": 8, "batch": 1024},
    },
    targets={
        "tiny": Target(loss=1.0, steps=60),
        "small": Target(loss=1.5, steps=60),
        "paper": Target(loss=1.5, steps=60),
    },
    build=build_tabular,
    tags=frozenset({"extra"}),
)
