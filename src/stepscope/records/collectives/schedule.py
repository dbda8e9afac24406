"""A collective as a list of steps, each a list of messages.

The vector is cut into as many chunks as there are ranks. Chunk c belongs to rank c: an all-gather
starts with it there, a reduce-scatter ends with its sum there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Message:
    """Some chunks on their way; the target adds them to its own, or else keeps them instead."""

    source: int
    target: int
    chunks: tuple[int, ...]  # ascending
    adds: bool = False


Steps = tuple[tuple[Message, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSchedule:
    """All messages of a step leave together, with what their sources held before the step."""

    kind: str
    algorithm: str
    ranks: int
    chunks: int  # that the vector is cut into; as many as ranks, except in probes of a link
    steps: Steps


def mirrored(steps: Iterable[Iterable[Message]], *, adds: bool = True) -> Steps:
    """The same ways backwards: copies that spread become sums that gather (or, without `adds`,
    what was gathered is handed out again).

    An all-gather takes each chunk along a tree to all ranks; backwards, the same trees add all
    ranks' chunks up where they came from, which is a reduce-scatter.
    """
    return tuple(
        tuple(Message(one.target, one.source, one.chunks, adds=adds) for one in step)
        for step in reversed(tuple(steps))
    )


def chunk_bounds(count: int, chunks: int) -> list[int]:
    """Where each chunk of `count` elements begins, and the end; sizes differ by one at most."""
    return [count * place // chunks for place in range(chunks + 1)]


def runs(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending chunks as runs of neighbours: the first of each, and the one after its last."""
    joined: list[tuple[int, int]] = []
    for chunk in chunks:
        if joined and joined[-1][1] == chunk:
            joined[-1] = (joined[-1][0], chunk + 1)
        else:
            joined.append((chunk, chunk + 1))
    return joined
