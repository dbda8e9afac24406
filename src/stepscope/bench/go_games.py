"""Go on tensors: many games at once, without a branch on what is on the boards.

Rules are Tromp and Taylor's (own stones without liberties die too) but for the ko: a lone stone
that was just taken may not be put back at once. Boards hold 1 for the player to move, -1 for the
other, 0 for empty points.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

PLANES = 17  # eight positions of both players' stones, and whose turn it is
KOMI = 0.5  # what the second player is given


def neighbours(edge: int, device: torch.device) -> torch.Tensor:
    """(points, points): 1 where two points are next to each other."""
    at = torch.arange(edge * edge, device=device)
    row, column = at // edge, at % edge
    apart = (row[:, None] - row).abs() + (column[:, None] - column).abs()
    return (apart == 1).float()


class GoGames:
    """Boards of all games, the last eight positions of each, and the points that ko forbids."""

    def __init__(self, games: int, edge: int, device: torch.device) -> None:
        points = edge**2
        self.edge, self.next_to = edge, neighbours(edge, device)
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
