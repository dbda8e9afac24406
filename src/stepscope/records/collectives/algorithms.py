"""The seven algorithms by name, for all-reduce, all-gather and reduce-scatter.

An all-reduce is a reduce-scatter and then an all-gather, and the reduce-scatter is an all-gather
backwards; two algorithms can do better with whole vectors (recursive doubling, the tree). Where an
algorithm needs a power of two, or hosts with equally many ranks, the ranks that are too many are
folded: they hand their vector to a partner first and get the result from it at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.errors import UsageError
from stepscope.records.collectives import patterns
from stepscope.records.collectives.patterns import Party, all_chunks
from stepscope.records.collectives.schedule import (
    COLLECTIVES,
    CollectiveSchedule,
    Message,
    mirrored,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.records.collectives.schedule import Steps

    Groups = Sequence[Sequence[int]]

LARGEST = 4096  # ranks: a schedule lists every message


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSteps:
    """The three collectives' steps."""

    all_reduce: Steps
    all_gather: Steps
    reduce_scatter: Steps


def build_schedule(
    algorithm: str, kind: str, ranks: int, groups: Groups | None = None
) -> CollectiveSchedule:
    """The schedule of one collective; `groups` are the ranks of each host, for hierarchical."""
    if algorithm not in ALGORITHMS:
        raise UsageError(f"no algorithm {algorithm!r}: choose one of {', '.join(ALGORITHMS)}")
    if kind not in COLLECTIVES:
        raise UsageError(f"no schedule for {kind!r}: choose one of {', '.join(COLLECTIVES)}")
    if not 1 <= ranks <= LARGEST:
        raise UsageError(f"a schedule needs 1 to {LARGEST} ranks, not {ranks}")
    parties = [Party(rank, (rank,)) for rank in range(ranks)]
    steps = getattr(ALGORITHMS[algorithm](parties, _checked(groups, ranks)), kind)
    return CollectiveSchedule(
        kind=kind,
        algorithm=algorithm,
        ranks=ranks,
        chunks=ranks,
        steps=tuple(step for step in steps if step),
    )


def square_groups(ranks: int) -> list[list[int]]:
    """Neighbours in groups as square as the number of ranks allows: 8 is four groups of 2."""
    size = next(size for size in range(math.isqrt(ranks), 0, -1) if ranks % size == 0)
    return [list(range(first, first + size)) for first in range(0, ranks, size)]


def host_groups(ranks: int, hosts: Groups) -> Groups:
    """The hosts, if there are several and one has several ranks; else groups of neighbours."""
    return hosts if 1 < len(hosts) < ranks else square_groups(ranks)


def _checked(groups: Groups | None, ranks: int) -> Groups:
    if groups is None:
        return square_groups(ranks)
    if sorted(rank for group in groups for rank in group) != list(range(ranks)) or not all(groups):
        raise UsageError(
            f"groups have to hold each of {ranks} ranks once: {list(map(list, groups))}"
        )
    return groups


def _ring(parties: Sequence[Party], _: Groups) -> CollectiveSteps:
    """Both halves go round in the same direction."""
    return _phases(patterns.ring(parties), scatter=mirrored(patterns.ring(parties, toward=-1)))


def _binomial_tree(parties: Sequence[Party], _: Groups) -> CollectiveSteps:
    gather, broadcast = patterns.binomial_gather(parties), patterns.binomial_broadcast(parties)
    return CollectiveSteps(
        all_reduce=mirrored(broadcast) + broadcast,
        all_gather=gather + broadcast,
        reduce_scatter=mirrored(broadcast) + mirrored(gather, adds=False),
    )


def _halving_doubling(parties: Sequence[Party], _: Groups) -> CollectiveSteps:
    fold = _fold_to_power_of_two(parties)
    return _folded(fold, _phases(patterns.doubling(fold.parties)))


def _recursive_doubling(parties: Sequence[Party], _: Groups) -> CollectiveSteps:
    """The all-reduce exchanges whole vectors; the reduce-scatter starts with near partners."""
    fold = _fold_to_power_of_two(parties)
    gather = patterns.doubling(fold.parties)
    everything = all_chunks(fold.parties)
    whole = tuple(
        tuple(Message(one.source, one.target, everything, adds=True) for one in step)
        for step in gather
    )
    scatter = mirrored(patterns.doubling_far_first(fold.parties))
    return _folded(
        fold, CollectiveSteps(all_reduce=whole, all_gather=gather, reduce_scatter=scatter)
    )


def _direct(parties: Sequence[Party], _: Groups) -> CollectiveSteps:
    return _phases(patterns.direct(parties))


def _bruck(parties: Sequence[Party], _: Groups) -> CollectiveSteps:
    return _phases(patterns.bruck(parties))


def _hierarchical(parties: Sequence[Party], groups: Groups) -> CollectiveSteps:
    """Rings inside hosts and rings between them: the i-th ranks of all hosts share a ring."""
    fold = _fold_to_equal_groups(parties, groups)
    hosts = [[party for party in fold.parties if party.rank in group] for group in groups]

    def rings(toward: int) -> Steps:
        peers = list(zip(*hosts, strict=True))
        between = _at_once([patterns.ring(peer, toward) for peer in peers])
        held = [all_chunks(peer) for peer in peers]
        inside = [
            patterns.ring([Party(one.rank, held[i]) for i, one in enumerate(host)], toward)
            for host in hosts
        ]
        return between + _at_once(inside)

    return _folded(fold, _phases(rings(1), scatter=mirrored(rings(-1))))


def _phases(gather: Steps, *, scatter: Steps | None = None) -> CollectiveSteps:
    """Of an all-gather; a reduce-scatter that is not its mirror image is given."""
    scatter = mirrored(gather) if scatter is None else scatter
    return CollectiveSteps(all_reduce=scatter + gather, all_gather=gather, reduce_scatter=scatter)


def _at_once(schedules: Sequence[Steps]) -> Steps:
    """Equally long schedules of different ranks, side by side."""
    return tuple(
        tuple(message for step in steps for message in step)
        for steps in zip(*schedules, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Parties that take part, and for each rank that does not, the party that stands for it."""

    parties: list[Party]
    folded: list[tuple[int, int]]  # (rank, partner)
    everything: tuple[int, ...]

    @property
    def enter(self) -> Steps:
        """Chunks of the folded ranks go to their partners."""
        return (tuple(Message(rank, partner, (rank,)) for rank, partner in self.folded),)

    @property
    def leave(self) -> Steps:
        """Partners send the whole vector back."""
        return (tuple(Message(partner, rank, self.everything) for rank, partner in self.folded),)


def _folded(fold: Fold, core: CollectiveSteps) -> CollectiveSteps:
    """The steps of the parties that take part, with those of the folded ranks around them."""
    if not fold.folded:
        return core
    return CollectiveSteps(
        all_reduce=mirrored(fold.leave) + core.all_reduce + fold.leave,
        all_gather=fold.enter + core.all_gather + fold.leave,
        reduce_scatter=mirrored(fold.leave)
        + core.reduce_scatter
        + mirrored(fold.enter, adds=False),
    )


def _fold(parties: Sequence[Party], partners: dict[int, int]) -> Fold:
    chunks = {party.rank: party.chunks for party in parties if party.rank not in partners}
    for rank, partner in partners.items():
        chunks[partner] = (*chunks[partner], rank)
    return Fold(
        parties=[Party(rank, tuple(sorted(held))) for rank, held in sorted(chunks.items())],
        folded=sorted(partners.items()),
        everything=all_chunks(parties),
    )


def _fold_to_power_of_two(parties: Sequence[Party]) -> Fold:
    """With r ranks too many, the odd ones of the first 2r hand over to the even ones."""
    too_many = len(parties) - (1 << (len(parties).bit_length() - 1))
    ranks = [party.rank for party in parties]
    return _fold(parties, {ranks[2 * i + 1]: ranks[2 * i] for i in range(too_many)})


def _fold_to_equal_groups(parties: Sequence[Party], groups: Groups) -> Fold:
    """Every group keeps as many ranks as the smallest one has; the others hand over in turn."""
    kept = min(map(len, groups))
    partners = {
        rank: group[place % kept] for group in groups for place, rank in enumerate(group[kept:])
    }
    return _fold(parties, partners)


ALGORITHMS: dict[str, Callable[[Sequence[Party], Groups], CollectiveSteps]] = {
    "ring": _ring,
    "binomial_tree": _binomial_tree,
    "halving_doubling": _halving_doubling,
    "recursive_doubling": _recursive_doubling,
    "bruck": _bruck,
    "direct": _direct,
    "hierarchical": _hierarchical,
}
