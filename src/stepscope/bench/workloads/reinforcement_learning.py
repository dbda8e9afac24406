"""Players that learn from their own games: an actor-critic at a paddle game, MiniGo at Go on
tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Config, Step, Target, TrainingPlace, TrainingWorkload, descend
from stepscope.bench.workloads.building_blocks import convolution, in_sizes

# Advantage actor-critic: a paddle that must stay under falling balls, seen as pixels only.
#
# A synchronous A3C: many games are played at once, a few moves in each, then all are learnt from.

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


def build_actor_critic(config: Config, place: TrainingPlace) -> Step:
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


# A batch is of games that are played at once, with so many `moves` of each in a step.
A3C = {"batch": 256, "moves": 20, "screen": 84, "width": 16, "discount": 0.9, "lr": 1e-3}
ACTOR_CRITIC_WORKLOAD = TrainingWorkload(
    name="actor-critic",
    task="reinforcement learning",
    source="Mnih et al., Asynchronous Methods for Deep Reinforcement Learning, 2016 (feed-forward)",
    samples="rollouts",
    sizes=in_sizes(
        A3C,
        tiny={"batch": 32, "moves": 5, "screen": 36, "width": 8, "lr": 3e-3},
        paper={"batch": 16, "moves": 5},
    ),
    targets={"tiny": Target(0.55, 60), "small": Target(0.6, 60), "paper": Target(0.65, 60)},
    build=build_actor_critic,
    tags=frozenset({"convolutional", "reinforcement"}),
)


# Go on tensors: many games at once, without a branch on what is on the boards.
#
# Rules are Tromp and Taylor's (own stones without liberties die too) but for the ko: a lone stone
# that was just taken may not be put back at once. Boards hold 1 for the player to move, -1 for the
# other, 0 for empty points.

PLANES = 17  # eight positions of both players' stones, and whose turn it is
KOMI = 0.5  # what the second player is given


class GoGames:
    """Boards of all games, the last eight positions of each, and the points that ko forbids."""

    def __init__(self, games: int, edge: int, device: torch.device) -> None:
        points = edge**2
        # (points, points): 1 where two points are next to each other.
        at = torch.arange(edge * edge, device=device)
        row, column = at // edge, at % edge
        apart = (row[:, None] - row).abs() + (column[:, None] - column).abs()
        self.edge, self.next_to = edge, (apart == 1).float()
        self.doublings = math.ceil(math.log2(points))
        self.history = torch.zeros(games, 8, points, device=device)  # the newest first
        self.forbidden = torch.zeros(games, points, device=device)
        self.turn = torch.zeros(games, device=device)  # 1 for the second player

    def planes(self) -> torch.Tensor:
        own, other = (self.history > 0).float(), (self.history < 0).float()
        turn = self.turn[:, None, None].expand(-1, 1, own.shape[2])
        return torch.cat((own, other, turn), 1).unflatten(2, (self.edge, self.edge))

    def allowed(self) -> torch.Tensor:
        """Empty points but for ko; passing always is."""
        empty = (self.history[:, 0] == 0) & (self.forbidden == 0)
        return functional.pad(empty, (0, 1), value=True)

    def groups(self, board: torch.Tensor) -> torch.Tensor:
        """(games, points, points): 1 where points of one colour, or empty ones, are connected."""
        same = (board[:, :, None] == board[:, None]).float()
        connected = same * self.next_to + torch.eye(board.shape[1], device=board.device)
        for _ in range(self.doublings):  # paths get twice as long with each
            connected = (torch.bmm(connected, connected) > 0).float()
        return connected

    def reach(self, groups: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        """Whether a point's group is next to one of `points`."""
        return (groups @ (points.float() @ self.next_to)[:, :, None])[:, :, 0] > 0

    def play(self, move: torch.Tensor) -> None:
        """Put stones (or pass), take what has no liberties, and let the other player move."""
        placed = functional.one_hot(move, self.edge**2 + 1)[:, :-1]
        board = self.history[:, 0] + placed
        groups = self.groups(board)
        taken = (board < 0) & ~self.reach(groups, board == 0)
        board = board.masked_fill(taken, 0)
        board = board.masked_fill((board > 0) & ~self.reach(groups, board == 0), 0)
        self.forbidden = (taken & (taken.sum(1, keepdim=True) == 1)).float()
        self.history = -torch.cat((board[:, None], self.history[:, :-1]), 1)
        self.turn = 1 - self.turn

    def ahead(self) -> torch.Tensor:
        """1 where the player to move has the larger area (stones and what only they reach)."""
        board = self.history[:, 0]
        groups = self.groups(board)
        own, other = (self.reach(groups, board * side > 0) for side in (1, -1))
        empty = board == 0
        area = board + (empty & own & ~other).float() - (empty & other & ~own).float()
        return torch.sign(area.sum(1) + KOMI * (2 * self.turn - 1))

    def restart(self, which: torch.Tensor) -> None:
        keep = (~which).float()
        self.history = self.history * keep[:, None, None]
        self.forbidden, self.turn = self.forbidden * keep[:, None], self.turn * keep


# MiniGo: a residual net plays Go against itself and learns its moves and who will be ahead.
#
# Moves are drawn from the net, without a tree search.


class ResidualTower(nn.Module):
    """Two convolutions, whose input is added to their result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        first, second = convolution(width, width, 3), convolution(width, width, 3)
        self.path = nn.Sequential(*first, nn.ReLU(), *second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.path(x))


class GoNet(nn.Module):
    """Logits of all points and of passing, and who will be ahead: 1 is the player to move."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, points = config.width, config.board**2
        blocks = (ResidualTower(width) for _ in range(config.blocks))
        self.tower = nn.Sequential(*convolution(PLANES, width, 3), nn.ReLU(), *blocks)
        self.policy = nn.Sequential(
            *convolution(width, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(2 * points, points + 1)
        )
        self.value = nn.Sequential(
            *convolution(width, 1, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(points, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def forward(self, planes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tower(planes)
        return self.policy(x).float(), self.value(x).float().tanh().squeeze(1)


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


def build_minigo(config: Config, place: TrainingPlace) -> Step:
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
        return descend(optimizer, loss)

    return step


ALPHAGO_ZERO = {
    "batch": 16, "moves": 4, "steps_of_a_game": 60, "board": 19, "width": 256, "blocks": 19,
    "lr": 1e-3,
}  # fmt: skip
MINIGO_TINY = {
    "batch": 32, "moves": 4, "steps_of_a_game": 6, "board": 5, "width": 16, "blocks": 2, "lr": 1e-2,
}  # fmt: skip
MINIGO_WORKLOAD = TrainingWorkload(
    name="minigo",
    task="reinforcement learning",
    source="Silver et al., Mastering the Game of Go without Human Knowledge, 2017 (19 blocks)",
    samples="games",
    sizes=in_sizes(
        ALPHAGO_ZERO, tiny=MINIGO_TINY, paper={"batch": 256, "moves": 8, "steps_of_a_game": 30}
    ),
    targets={"tiny": Target(3.42, 60), "small": Target(6.2, 60), "paper": Target(6.2, 60)},
    build=build_minigo,
    tags=frozenset({"convolutional", "reinforcement"}),
)
