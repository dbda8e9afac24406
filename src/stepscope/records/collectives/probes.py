"""Steps that measure a link instead of computing anything: the same messages again and again.

The difference between many steps and one is what a step costs, without what a call costs. Steps use
two sets of chunks in turns: a receive can then be posted a step early, as in the algorithms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stepscope.records.collectives.schedule import CollectiveSchedule, Message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.collectives.schedule import Steps

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
    """What `hop`, `add`, `pair`, `fan` and `inside` measure: docs/records/collectives.md."""
    everyone = [list(range(ranks))]
    probes = [
        _probe("hop", 1, ranks, _shift(everyone)),
        _probe("hop", MANY, ranks, _shift(everyone)),
        _probe("add", MANY, ranks, _shift(everyone, adds=True)),
    ]
    if ranks > 2:
        probes.append(_probe("pair", MANY, ranks, _shift([[0, 1]])))
        probes.append(_probe("fan", MANY, ranks, _fan(ranks), ranks))
    if 1 < len(hosts) < ranks:
        probes.append(_probe("inside", MANY, ranks, _shift(hosts)))
    return probes


def _probe(
    name: str, steps: int, ranks: int, step: tuple[Message, ...], chunks: int = _COLOURS
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


def _shift(rings: Sequence[Sequence[int]], *, adds: bool = False) -> tuple[Message, ...]:
    """Everyone in a ring sends to the next; neighbours send different chunks."""
    return tuple(
        Message(rank, ring[(place + 1) % len(ring)], (_colour(place, len(ring)),), adds=adds)
        for ring in rings
        if len(ring) > 1
        for place, rank in enumerate(ring)
    )


def _colour(place: int, count: int) -> int:
    """Neighbours differ, also the last and the first of an odd ring."""
    return 2 if count % 2 and place == count - 1 else place % 2


def _fan(ranks: int) -> tuple[Message, ...]:
    """Everyone sends to everyone else."""
    return tuple(
        Message(source, target, (source,))
        for source in range(ranks)
        for target in range(ranks)
        if source != target
    )
