"""Collectives as data: who sends which chunks to whom, step by step; the seven algorithms,
probes of a link, and the proof that a schedule is right. Standard library only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stepscope.errors import UsageError

if TYPE_CHECKING:
    Groups = Sequence[Sequence[int]]
    Held = list[list[frozenset[int]]]

# A collective as a list of steps, each a list of messages.
#
# The vector is cut into as many chunks as there are ranks. Chunk c belongs to rank c: an all-gather
# starts with it there, a reduce-scatter ends with its sum there.

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Transfer:
    """Some chunks on their way; the target adds them to its own, or else keeps them instead."""

    source: int
    target: int
    chunks: tuple[int, ...]  # ascending
    adds: bool = False


Steps = tuple[tuple[Transfer, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSchedule:
    """All messages of a step leave together, with what their sources held before the step."""

    kind: str
    algorithm: str
    ranks: int
    chunks: int  # that the vector is cut into; as many as ranks, except in probes of a link
    steps: Steps


def mirrored(steps: Iterable[Iterable[Transfer]], *, adds: bool = True) -> Steps:
    """The same ways backwards: copies that spread become sums that gather (or, without `adds`,
    what was gathered is handed out again).

    An all-gather takes each chunk along a tree to all ranks; backwards, the same trees add all
    ranks' chunks up where they came from, which is a reduce-scatter.
    """
    return tuple(
        tuple(Transfer(one.target, one.source, one.chunks, adds=adds) for one in step)
        for step in reversed(tuple(steps))
    )


def chunk_bounds(count: int, chunks: int) -> list[int]:
    """Return where chunks of `count` elements begin, and the end; sizes differ by one at most."""
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


# All-gathers, each in a few lines. Backwards (`mirrored`) they are reduce-scatters.
#
# A party is a rank with the chunks that it brings: usually its own one, more where ranks were
# folded into others or stand for a whole host.


@dataclass(frozen=True, slots=True)
class Party:
    """A rank, and the chunks that it brings to an all-gather."""

    rank: int
    chunks: tuple[int, ...]


def all_chunks(parties: Iterable[Party]) -> tuple[int, ...]:
    return tuple(sorted(chunk for party in parties for chunk in party.chunks))


def _exchange(
    parties: Sequence[Party],
    rounds: Iterable[int],
    target: Callable[[int, int], int],
    given: Callable[[int, int], Iterable[Party]],
) -> Steps:
    """Send one message of every party per round: to whom, and whose chunks, by their places."""
    return tuple(
        tuple(
            Transfer(
                party.rank, parties[target(place, number)].rank, all_chunks(given(place, number))
            )
            for place, party in enumerate(parties)
        )
        for number in rounds
    )


def _distances(count: int) -> list[int]:
    return [1 << power for power in range((count - 1).bit_length())]


def ring(parties: Sequence[Party], toward: int = 1) -> Steps:
    """Pass on to one neighbour what came from the other, p-1 times."""
    count = len(parties)
    return _exchange(
        parties,
        range(count - 1),
        lambda place, _step: (place + toward) % count,
        lambda place, step: [parties[(place - toward * step) % count]],
    )


def doubling(parties: Sequence[Party]) -> Steps:
    """Neighbours exchange all they have, then neighbours of two, of four: a power of two."""
    return _exchange(
        parties,
        _distances(len(parties)),
        lambda place, distance: place ^ distance,
        lambda place, distance: parties[place // distance * distance :][:distance],
    )


def doubling_far_first(parties: Sequence[Party]) -> Steps:
    """The same exchanges with the farthest partner first: a power of two."""
    count = len(parties)
    return _exchange(
        parties,
        reversed(_distances(count)),
        lambda place, distance: place ^ distance,
        lambda place, distance: parties[place % (2 * distance) % count :: 2 * distance],
    )


def bruck(parties: Sequence[Party]) -> Steps:
    """Everyone sends all it has 1 place back, then 2, then 4: any number of ranks.

    Before the step of distance d a party has its own chunks and those of the d-1 parties after it.
    """
    count = len(parties)
    return _exchange(
        parties,
        _distances(count),
        lambda place, distance: (place - distance) % count,
        lambda place, distance: (
            parties[(place + ahead) % count] for ahead in range(min(distance, count - distance))
        ),
    )


def direct(parties: Sequence[Party]) -> Steps:
    """Everyone sends its own chunks to everyone else at once."""
    step = tuple(
        Transfer(source.rank, target.rank, source.chunks)
        for source in parties
        for target in parties
        if source != target
    )
    return (step,) if step else ()


def binomial_gather(parties: Sequence[Party]) -> Steps:
    """Gather up a binomial tree: pairs, then pairs of pairs, until the first party has all."""
    count = len(parties)
    return tuple(
        tuple(
            Transfer(
                parties[place].rank,
                parties[place - distance].rank,
                all_chunks(parties[place : place + distance]),
            )
            for place in range(distance, count, 2 * distance)
        )
        for distance in _distances(count)
    )


def binomial_broadcast(parties: Sequence[Party]) -> Steps:
    """Down the same tree: the first party sends everything to half of the others, and so on."""
    everything = all_chunks(parties)
    return tuple(
        tuple(Transfer(one.target, one.source, everything) for one in step)
        for step in reversed(binomial_gather(parties))
    )


# The seven algorithms by name, for all-reduce, all-gather and reduce-scatter.
#
# An all-reduce is a reduce-scatter and then an all-gather, and the reduce-scatter is an all-gather
# backwards; two algorithms can do better with whole vectors (recursive doubling, the tree). Where
# an algorithm needs a power of two, or hosts with equally many ranks, the ranks that are too many
# are folded: they hand their vector to a partner first and get the result from it at the end.

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
    return _phases(ring(parties), scatter=mirrored(ring(parties, toward=-1)))


def _binomial_tree(parties: Sequence[Party], _: Groups) -> CollectiveSteps:
    gather, broadcast = binomial_gather(parties), binomial_broadcast(parties)
    return CollectiveSteps(
        all_reduce=mirrored(broadcast) + broadcast,
        all_gather=gather + broadcast,
        reduce_scatter=mirrored(broadcast) + mirrored(gather, adds=False),
    )


def _halving_doubling(parties: Sequence[Party], _: Groups) -> CollectiveSteps:
    fold = _fold_to_power_of_two(parties)
    return _folded(fold, _phases(doubling(fold.parties)))


def _recursive_doubling(parties: Sequence[Party], _: Groups) -> CollectiveSteps:
    """The all-reduce exchanges whole vectors; the reduce-scatter starts with near partners."""
    fold = _fold_to_power_of_two(parties)
    gather = doubling(fold.parties)
    everything = all_chunks(fold.parties)
    whole = tuple(
        tuple(Transfer(one.source, one.target, everything, adds=True) for one in step)
        for step in gather
    )
    scatter = mirrored(doubling_far_first(fold.parties))
    return _folded(
        fold, CollectiveSteps(all_reduce=whole, all_gather=gather, reduce_scatter=scatter)
    )


def _hierarchical(parties: Sequence[Party], groups: Groups) -> CollectiveSteps:
    """Rings inside hosts and rings between them: the i-th ranks of all hosts share a ring."""
    # Every group keeps as many ranks as the smallest one has; the others hand over in turn.
    kept = min(map(len, groups))
    partners = {
        rank: group[place % kept] for group in groups for place, rank in enumerate(group[kept:])
    }
    fold = _fold(parties, partners)
    hosts = [[party for party in fold.parties if party.rank in group] for group in groups]

    def rings(toward: int) -> Steps:
        peers = list(zip(*hosts, strict=True))
        between = _at_once([ring(peer, toward) for peer in peers])
        held = [all_chunks(peer) for peer in peers]
        inside = [
            ring([Party(one.rank, held[i]) for i, one in enumerate(host)], toward) for host in hosts
        ]
        return between + _at_once(inside)

    return _folded(fold, _phases(rings(1), scatter=mirrored(rings(-1))))


def _phases(gather: Steps, *, scatter: Steps | None = None) -> CollectiveSteps:
    """Return an all-gather's phases; a reduce-scatter that is not its mirror image is given."""
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
        return (tuple(Transfer(rank, partner, (rank,)) for rank, partner in self.folded),)

    @property
    def leave(self) -> Steps:
        """Partners send the whole vector back."""
        return (tuple(Transfer(partner, rank, self.everything) for rank, partner in self.folded),)


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
    """Fold r ranks too many: the odd ones of the first 2r hand over to the even ones."""
    too_many = len(parties) - (1 << (len(parties).bit_length() - 1))
    ranks = [party.rank for party in parties]
    return _fold(parties, {ranks[2 * i + 1]: ranks[2 * i] for i in range(too_many)})


ALGORITHMS: dict[str, Callable[[Sequence[Party], Groups], CollectiveSteps]] = {
    "ring": _ring,
    "binomial_tree": _binomial_tree,
    "halving_doubling": _halving_doubling,
    "recursive_doubling": _recursive_doubling,
    "bruck": lambda parties, _: _phases(bruck(parties)),
    "direct": lambda parties, _: _phases(direct(parties)),
    "hierarchical": _hierarchical,
}


# Steps that measure a link instead of computing anything: the same messages again and again.
#
# The difference between many steps and one is what a step costs, without what a call costs. Steps
# use two sets of chunks in turns: a receive can then be posted a step early, as in the algorithms.

_COLOURS = 3  # chunks of a set: no rank of a ring gets the chunk that it sends
_SETS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbe:
    """A step of some pattern, `steps` times; its size is that of one message."""

    name: str
    steps: int
    schedule: CollectiveSchedule


MANY = 4


def build_probes(ranks: int, hosts: Sequence[Sequence[int]]) -> list[LinkProbe]:
    """Return what `hop`, `add`, `pair`, `fan` and `inside` measure: docs/records/collectives.md."""
    everyone = [list(range(ranks))]
    probes = [
        _probe("hop", 1, ranks, _shift(everyone)),
        _probe("hop", MANY, ranks, _shift(everyone)),
        _probe("add", MANY, ranks, _shift(everyone, adds=True)),
    ]
    if ranks > 2:
        [everyone_to_everyone] = direct([Party(rank, (rank,)) for rank in range(ranks)])
        probes.append(_probe("pair", MANY, ranks, _shift([[0, 1]])))
        probes.append(_probe("fan", MANY, ranks, everyone_to_everyone, ranks))
    if 1 < len(hosts) < ranks:
        probes.append(_probe("inside", MANY, ranks, _shift(hosts)))
    return probes


def _probe(
    name: str, steps: int, ranks: int, step: tuple[Transfer, ...], chunks: int = _COLOURS
) -> LinkProbe:
    """`chunks` are those that the step uses."""
    repeated: Steps = tuple(
        tuple(replace(one, chunks=(one.chunks[0] + chunks * (number % _SETS),)) for one in step)
        for number in range(steps)
    )
    schedule = CollectiveSchedule(
        kind="probe", algorithm=name, ranks=ranks, chunks=_SETS * chunks, steps=repeated
    )
    return LinkProbe(name=name, steps=steps, schedule=schedule)


def _shift(rings: Sequence[Sequence[int]], *, adds: bool = False) -> tuple[Transfer, ...]:
    """Everyone in a ring sends to the next; neighbours send different chunks."""
    return tuple(
        Transfer(rank, ring[(place + 1) % len(ring)], (_colour(place, len(ring)),), adds=adds)
        for ring in rings
        if len(ring) > 1
        for place, rank in enumerate(ring)
    )


def _colour(place: int, count: int) -> int:
    """Neighbours differ, also the last and the first of an odd ring."""
    return 2 if count % 2 and place == count - 1 else place % 2


# A schedule run with symbols: what each rank holds, as the set of ranks whose data is in it.
#
# Sets show what numbers hide: a contribution that was counted twice, or never came.


class WrongScheduleError(ValueError):
    """A schedule that does not compute its collective."""


def start_of(schedule: CollectiveSchedule) -> Held:
    """An all-gather begins with one chunk on each rank, the others with all of them."""
    everyone = range(schedule.ranks)
    if schedule.kind == "all_gather":
        return [[frozenset({rank} & {chunk}) for chunk in everyone] for rank in everyone]
    return [[frozenset({rank}) for _ in everyone] for rank in everyone]


def simulate(schedule: CollectiveSchedule) -> Iterator[Held]:
    """Return what all ranks hold at the start and after each step. Raises WrongScheduleError."""
    held = start_of(schedule)
    yield held
    for number, step in enumerate(schedule.steps):
        place = f"{schedule.algorithm} {schedule.kind}, {schedule.ranks} ranks, step {number}"
        _check_step(step, place)
        after = [list(chunks) for chunks in held]
        for message in step:
            for chunk in message.chunks:
                _deliver(after, held, message, chunk, place)
        held = after
        yield held


def _check_step(step: tuple[Transfer, ...], place: str) -> None:
    """A pair of ranks has one message at most, and a chunk is replaced once at most."""
    if any(message.source == message.target for message in step):
        raise WrongScheduleError(f"{place}: a rank sends to itself")
    pairs = Counter((message.source, message.target) for message in step)
    written = Counter((message.target, chunk) for message in step for chunk in message.chunks)
    replaced = {
        (message.target, chunk) for message in step if not message.adds for chunk in message.chunks
    }
    if max(pairs.values(), default=0) > 1:
        raise WrongScheduleError(f"{place}: two messages between the same ranks")
    if any(written[where] > 1 for where in replaced):
        raise WrongScheduleError(f"{place}: a chunk is replaced and written again")


def _deliver(after: Held, before: Held, message: Transfer, chunk: int, place: str) -> None:
    sent = before[message.source][chunk]
    there = after[message.target][chunk]
    if not sent:
        raise WrongScheduleError(f"{place}: rank {message.source} has no chunk {chunk} to send")
    if message.adds and sent & there:
        raise WrongScheduleError(
            f"{place}: rank {message.target} would count {sorted(sent & there)} twice"
        )
    if not message.adds and not there <= sent:
        raise WrongScheduleError(
            f"{place}: rank {message.target} would lose {sorted(there - sent)} in chunk {chunk}"
        )
    after[message.target][chunk] = sent | there
