"""All-gathers, each in a few lines. Backwards (`mirrored`) they are reduce-scatters.

A party is a rank with the chunks that it brings: usually its own one, more where ranks were folded
into others or stand for a whole host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.records.collectives.schedule import Message

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.records.collectives.schedule import Steps


@dataclass(frozen=True, slots=True)
class Party:
    """A rank, and the chunks that it brings to an all-gather."""

    rank: int
    chunks: tuple[int, ...]


def all_chunks(parties: Iterable[Party]) -> tuple[int, ...]:
    return tuple(sorted(chunk for party in parties for chunk in party.chunks))


def ring(parties: Sequence[Party], toward: int = 1) -> Steps:
    """Everyone passes on to one neighbour what came from the other, p-1 times."""
    count = len(parties)
    return tuple(
        tuple(
            Message(
                parties[place].rank,
                parties[(place + toward) % count].rank,
                parties[(place - toward * step) % count].chunks,
            )
            for place in range(count)
        )
        for step in range(count - 1)
    )


def doubling(parties: Sequence[Party]) -> Steps:
    """Neighbours exchange all they have, then neighbours of two, of four: a power of two."""
    distances = [1 << power for power in range((len(parties) - 1).bit_length())]
    return tuple(
        tuple(
            Message(
                party.rank,
                parties[place ^ distance].rank,
                all_chunks(parties[place // distance * distance :][:distance]),
            )
            for place, party in enumerate(parties)
        )
        for distance in distances
    )


def doubling_far_first(parties: Sequence[Party]) -> Steps:
    """The same exchanges with the farthest partner first: a power of two."""
    count = len(parties)
    distances = [1 << power for power in reversed(range((count - 1).bit_length()))]
    return tuple(
        tuple(
            Message(
                party.rank,
                parties[place ^ distance].rank,
                all_chunks(parties[place % (2 * distance) % count :: 2 * distance]),
            )
            for place, party in enumerate(parties)
        )
        for distance in distances
    )


def bruck(parties: Sequence[Party]) -> Steps:
    """Everyone sends all it has 1 place back, then 2, then 4: any number of ranks.

    Before the step of distance d a party has its own chunks and those of the d-1 parties after it.
    """
    count = len(parties)
    distances = [1 << power for power in range((count - 1).bit_length())]
    return tuple(
        tuple(
            Message(
                parties[place].rank,
                parties[(place - distance) % count].rank,
                all_chunks(
                    parties[(place + ahead) % count]
                    for ahead in range(min(distance, count - distance))
                ),
            )
            for place in range(count)
        )
        for distance in distances
    )


def direct(parties: Sequence[Party]) -> Steps:
    """Everyone sends its own chunks to everyone else at once."""
    step = tuple(
        Message(source.rank, target.rank, source.chunks)
        for source in parties
        for target in parties
        if source != target
    )
    return (step,) if step else ()


def binomial_gather(parties: Sequence[Party]) -> Steps:
    """Up a binomial tree: pairs first, then pairs of pairs, until the first party has all."""
    count = len(parties)
    distances = [1 << power for power in range((count - 1).bit_length())]
    return tuple(
        tuple(
            Message(
                parties[place].rank,
                parties[place - distance].rank,
                all_chunks(parties[place : place + distance]),
            )
            for place in range(distance, count, 2 * distance)
        )
        for distance in distances
    )


def binomial_broadcast(parties: Sequence[Party]) -> Steps:
    """Down the same tree: the first party sends everything to half of the others, and so on."""
    everything = all_chunks(parties)
    return tuple(
        tuple(Message(one.target, one.source, everything) for one in step)
        for step in reversed(binomial_gather(parties))
    )
