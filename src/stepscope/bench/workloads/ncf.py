"""NeuMF: will this user take this movie? Users take the movies of their own taste."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Target, TrainingWorkload

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace


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


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(NeuMF(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    ratings = make_ratings(config, place)

    def step(number: int) -> torch.Tensor:
        user, movie, taken = ratings[number % len(ratings)]
        scores = model(user, movie).float()
        loss = functional.binary_cross_entropy_with_logits(scores, taken)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

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
TINY = {"batch": 2048, "users": 512, "movies": 256, "factors": 16, "lr": 2e-2}
WORKLOAD = TrainingWorkload(
    name="ncf",
    task="recommendation",
    source="He et al., Neural Collaborative Filtering, 2017; MovieLens 20M as in MLPerf 0.5",
    samples="ratings",
    sizes={
        "tiny": {**MOVIELENS_20M, **TINY},
        "small": MOVIELENS_20M,
        "paper": {**MOVIELENS_20M, "batch": 1_048_576},
    },
    targets={
        "tiny": Target(loss=0.3, steps=60),
        "small": Target(loss=0.6, steps=60),
        "paper": Target(loss=0.6, steps=60),
    },
    build=build,
    tags=frozenset({"recommendation"}),
)
