"""Advantage actor-critic: a paddle that must stay under falling balls, seen as pixels only.

A synchronous A3C: many games are played at once, a few moves in each, then all are learnt from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from stepscope.bench.workload import Target, TrainingWorkload

if TYPE_CHECKING:
    from stepscope.bench.workload import Config, Step, TrainingPlace

FRAMES = 4  # the last screens that the player sees
ACTIONS = 3  # left, stay, right
CELL = 4  # pixels: a ball's edge, a paddle's height, and how far both move at once


@dataclass(slots=True)
class CatchGames:
    """All games as tensors: columns and rows are in cells; (batch,) each, on the device."""

    cells: int  # the screen's edge
    ball: torch.Tensor  # its column
    row: torch.Tensor
    paddle: torch.Tensor  # its column; it is three cells wide
    screens: torch.Tensor  # (batch, FRAMES, edge, edge)

    def move(self, action: torch.Tensor) -> torch.Tensor:
        """The rewards: one over the paddle, down to minus one at the far side."""
        self.paddle = (self.paddle + action - 1).clamp(0, self.cells - 1)
        landed = self.row == self.cells - 1
        thrown = (torch.rand(self.ball.shape, device=self.ball.device) * self.cells).long()
        self.ball = torch.where(landed, thrown, self.ball)
        self.row = torch.where(landed, 0, self.row + 1)
        self.screens = torch.cat((self.screens[:, 1:], self.draw()[:, None]), 1)
        off = (self.ball - self.paddle).abs()
        return 1 - 2 * off / (self.cells - 1)

    def draw(self) -> torch.Tensor:
        cell = torch.arange(self.cells, device=self.ball.device)
        across, down = cell[None, None], cell[None, :, None]
        column, row, paddle = (each[:, None, None] for each in (self.ball, self.row, self.paddle))
        ball = (across == column) & (down == row)
        bar = ((across - paddle).abs() <= 1) & (down == self.cells - 1)
        screen = ball.float() + 0.5 * bar.float()
        return screen.repeat_interleave(CELL, 1).repeat_interleave(CELL, 2)


class ActorCritic(nn.Module):
    """Two convolutions and a layer; from them the moves' logits and the worth of the state."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        edge = ((config.screen - 8) // 4 + 1 - 4) // 2 + 1
        self.layers = nn.Sequential(
            nn.Conv2d(FRAMES, width, 8, 4),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, 2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * edge * edge, 16 * width),
            nn.ReLU(),
        )
        self.actor, self.critic = nn.Linear(16 * width, ACTIONS), nn.Linear(16 * width, 1)

    def forward(self, screens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layers(screens)
        return self.actor(x).float(), self.critic(x).float().squeeze(1)


def start_games(config: Config, place: TrainingPlace) -> CatchGames:
    draw, device, cells = place.generator(), place.device, config.screen // CELL
    ball, row, paddle = torch.randint(
        cells, (3, config.batch), generator=draw, device=device
    ).unbind()
    screens = torch.zeros(config.batch, FRAMES, config.screen, config.screen, device=device)
    return CatchGames(cells, ball, row, paddle, screens)


def draw_action(logits: torch.Tensor) -> torch.Tensor:
    """By the softmax of the logits; unlike multinomial, the host need not wait for the device."""
    return (logits - torch.empty_like(logits).exponential_().log()).argmax(1)


def play(model: nn.Module, games: CatchGames, config: Config) -> tuple[torch.Tensor, ...]:
    """Screens, actions and rewards of `moves` moves (moves, batch, ...), and the state's worth."""
    screens, actions, rewards = [], [], []
    with torch.no_grad():
        for _ in range(config.moves):
            screens.append(games.screens)
            actions.append(draw_action(model(games.screens)[0]))
            rewards.append(games.move(actions[-1]))
        worth = model(games.screens)[1]
    return torch.stack(screens), torch.stack(actions), torch.stack(rewards), worth


def discounted(rewards: torch.Tensor, worth: torch.Tensor, discount: float) -> torch.Tensor:
    """What each move led to: the rewards from there on, then the worth of the last state."""
    returns = []
    for reward in reversed(rewards.unbind()):
        worth = reward + discount * worth
        returns.append(worth)
    return torch.stack(returns[::-1])


def build(config: Config, place: TrainingPlace) -> Step:
    model = place.put(ActorCritic(config))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=config.lr, alpha=0.99, eps=1e-5)
    games = start_games(config, place)

    def step(number: int) -> torch.Tensor:  # noqa: ARG001
        """Returns what the player still misses of the best reward: the losses say nothing of it."""
        screens, actions, rewards, worth = play(model, games, config)
        logits, values = model(screens.flatten(0, 1))
        advantage = discounted(rewards, worth, config.discount).flatten() - values
        log_shares = logits.log_softmax(1)
        chosen = log_shares.gather(1, actions.flatten()[:, None])[:, 0]
        entropy = -(log_shares.exp() * log_shares).sum(1).mean()
        actor = -(chosen * advantage.detach()).mean()
        loss = actor + 0.5 * advantage.square().mean() - 0.01 * entropy
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return 1 - rewards.mean()

    return step


A3C = {
    "batch": 256,  # games at once
    "moves": 20,  # of each, in a step
    "screen": 84,
    "width": 16,
    "discount": 0.9,
    "lr": 1e-3,
}
WORKLOAD = TrainingWorkload(
    name="actor-critic",
    task="reinforcement learning",
    source="Mnih et al., Asynchronous Methods for Deep Reinforcement Learning, 2016 (feed-forward)",
    samples="rollouts",
    sizes={
        "tiny": {**A3C, "batch": 32, "moves": 5, "screen": 36, "width": 8, "lr": 3e-3},
        "small": A3C,
        "paper": {**A3C, "batch": 16, "moves": 5},
    },
    targets={
        "tiny": Target(loss=0.55, steps=60),
        "small": Target(loss=0.6, steps=60),
        "paper": Target(loss=0.65, steps=60),
    },
    build=build,
    tags=frozenset({"convolutional", "reinforcement"}),
)
