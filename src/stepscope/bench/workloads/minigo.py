"""MiniGo: a residual net plays Go against itself and learns its moves and who will be ahead.

Moves are drawn from the net, without a tree search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.go_games import PLANES, GoGames
from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.bench.workloads.actor_critic import draw_action

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace


class ResidualTower(nn.Module):
    """Two convolutions, whose input is added to their result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            board_layer(width, width, 3), nn.ReLU(), board_layer(width, width, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.path(x))


class GoNet(nn.Module):
    """Logits of all points and of passing, and who will be ahead: 1 is the player to move."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, points = config.width, config.board**2
        blocks = (ResidualTower(width) for _ in range(config.blocks))
        self.tower = nn.Sequential(board_layer(PLANES, width, 3), nn.ReLU(), *blocks)
        self.policy = nn.Sequential(
            board_layer(width, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(2 * points, points + 1)
        )
        self.value = nn.Sequential(
            board_layer(width, 1, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(points, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def forward(self, planes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tower(planes)
        return self.policy(x).float(), self.value(x).float().tanh().squeeze(1)


def board_layer(inputs: int, outputs: int, size: int) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


def self_play(model: nn.Module, games: GoGames, moves: int) -> tuple[torch.Tensor, ...]:
    """Positions, moves and who is ahead in the end, as the player of each move sees it."""
    model.eval()
    planes, chosen = [], []
    with torch.no_grad():
        for _ in range(moves):
            planes.append(games.planes())
            logits = model(planes[-1])[0].masked_fill(~games.allowed(), -torch.inf)
            chosen.append(draw_action(logits))
            games.play(chosen[-1])
    model.train()
    ahead = games.ahead()
    results = [ahead * (-1) ** (moves - number) for number in range(moves)]
    return torch.cat(planes), torch.cat(chosen), torch.cat(results)


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(GoNet(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=1e-4)
    games = GoGames(config.batch, config.board, place.device)
    number_of_game = torch.arange(config.batch, device=place.device)

    def step(number: int) -> torch.Tensor:
        # Games start at different times, so that every step sees all stages of a game.
        games.restart((number_of_game + number) % config.steps_of_a_game == 0)
        planes, moves, results = self_play(model, games, config.moves)
        logits, values = model(planes)
        # The moves of the side that came out ahead are the ones to learn.
        wrong = functional.cross_entropy(logits, moves, reduction="none")
        won = (results > 0).float()
        loss = (wrong * won).sum() / won.sum().clamp(min=1)
        loss = loss + 0.25 * functional.mse_loss(values, results)  # MLPerf's weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


ALPHAGO_ZERO = {
    "batch": 16,  # games at once
    "moves": 4,  # of each, in a step
    "steps_of_a_game": 60,
    "board": 19,
    "width": 256,
    "blocks": 19,
    "lr": 1e-3,
}
TINY = {
    "batch": 32,
    "moves": 4,
    "steps_of_a_game": 6,
    "board": 5,
    "width": 16,
    "blocks": 2,
    "lr": 1e-2,
}
WORKLOAD = TrainingWorkload(
    name="minigo",
    task="reinforcement learning",
    source="Silver et al., Mastering the Game of Go without Human Knowledge, 2017 (19 blocks)",
    samples="games",
    sizes={
        "tiny": {**ALPHAGO_ZERO, **TINY},
        "small": ALPHAGO_ZERO,
        "paper": {**ALPHAGO_ZERO, "batch": 256, "moves": 8, "steps_of_a_game": 30},
    },
    targets={
        "tiny": Target(loss=3.42, steps=60),
        "small": Target(loss=6.2, steps=60),
        "paper": Target(loss=6.2, steps=60),
    },
    build=build,
    tags=frozenset({"convolutional", "reinforcement"}),
)
