"""Who waits for whom: collectives by group and sequence number, over all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from stepscope.explain.hang.rank_state import RankDoing
from stepscope.records.hang import HangCollective, HangGroup

_MOST_MEMBERS = 1 << 20
# Shapes of these may differ between ranks.
_UNEVEN = frozenset(("all_to_all", "gather", "scatter", "all_gather", "reduce_scatter", "barrier"))


class Missing(NamedTuple):
    """Ranks that a collective waits for, and those that wait in it."""

    collective: HangCollective
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]


class Waits(NamedTuple):
    """The graph of waits, reduced to what explains it."""

    missing: tuple[Missing, ...]  # by ranks that wait for nobody themselves
    cycle: tuple[int, ...]  # ranks that wait for each other in different groups
    different: tuple[tuple[HangCollective, tuple[int, ...]], ...]  # at one place of a group
    entered_by_all: tuple[Missing, ...]  # that nobody ends
    by_stack: tuple[int, ...]  # ranks in a collective that no recorder knows


def find_waits(states: Mapping[int, RankDoing]) -> Waits:
    waiting = {rank: state for rank, state in states.items() if state.doing == "collective"}
    members = _members(states)
    missing: dict[tuple[str, int], tuple[HangCollective, list[int], set[int]]] = {}
    complete: dict[tuple[str, int], tuple[HangCollective, list[int]]] = {}
    edges: dict[int, set[int]] = {}
    lacking: dict[tuple[str, int], set[int]] = {}
    for rank, state in waiting.items():
        collective = state.waits_for
        if collective is None or collective.sequence is None:
            continue
        place = (collective.group, collective.sequence)
        if place not in lacking:
            lacking[place] = _lacking(place, members, states)
        absent = lacking[place] - {rank}
        edges[rank] = absent
        if absent:
            missing.setdefault(place, (collective, [], absent))[1].append(rank)
        else:
            complete.setdefault(place, (collective, []))[1].append(rank)
    roots = []
    for collective, ranks, absent in missing.values():
        free = tuple(sorted(rank for rank in absent if rank not in edges or not edges[rank]))
        if free:
            roots.append(Missing(collective, free, tuple(sorted(ranks))))
    # A rank that waits in a finished set of its own keeps others waiting, but not by itself.
    own = [one for one in roots if any(rank not in edges for rank in one.ranks)]
    if own:
        roots = [
            one._replace(ranks=tuple(rank for rank in one.ranks if rank not in edges))
            for one in own
        ]
    else:
        roots = []
    return Waits(
        missing=tuple(sorted(roots, key=lambda one: -len(one.waiting))),
        cycle=_cycle(edges) if not roots else (),
        different=_different(waiting),
        entered_by_all=tuple(
            Missing(collective, (), tuple(sorted(ranks))) for collective, ranks in complete.values()
        ),
        by_stack=tuple(rank for rank, state in waiting.items() if rank not in edges),
    )


def _members(states: Mapping[int, RankDoing]) -> dict[str, tuple[int, ...]]:
    members: dict[str, tuple[int, ...]] = {}
    for state in states.values():
        record = state.rank.record
        for group in record.collectives.groups if record and record.collectives else ():
            if group.name not in members:
                members[group.name] = _ranks_of(group)
    return members


def _ranks_of(group: HangGroup) -> tuple[int, ...]:
    each = (range(first, last + 1, step) for first, last, step in group.ranges)
    ranks = sorted({*group.ranks, *islice(chain.from_iterable(each), _MOST_MEMBERS)})
    return tuple(ranks) or tuple(range(min(group.size or 0, _MOST_MEMBERS)))


def _lacking(
    place: tuple[str, int],
    members: Mapping[str, Sequence[int]],
    states: Mapping[int, RankDoing],
) -> set[int]:
    """Members that have not entered it, as far as is known."""
    name, sequence = place
    absent = set()
    for rank in members.get(name, ()):
        state = states.get(rank)
        record = state.rank.record if state is not None else None
        if record is None or record.collectives is None:
            absent.add(rank)
            continue
        reached = record.collectives.reached.get(name)
        if reached is None or reached.entered < sequence:
            absent.add(rank)
    return absent


def _cycle(edges: Mapping[int, set[int]]) -> tuple[int, ...]:
    """Ranks that can be reached from themselves: the first such ring."""
    for start in sorted(edges):
        path, here, seen = [start], start, {start}
        while True:
            following = next((rank for rank in sorted(edges.get(here, ())) if rank in edges), None)
            if following is None:
                break
            if following in seen:
                return tuple(path[path.index(following) :])
            path.append(following)
            seen.add(following)
            here = following
    return ()


def _different(
    waiting: Mapping[int, RankDoing],
) -> tuple[tuple[HangCollective, tuple[int, ...]], ...]:
    """Ranks that call the same place of a group by different names or shapes."""
    places: dict[tuple[str, int], dict[tuple[object, ...], list[int]]] = defaultdict(dict)
    first: dict[tuple[object, ...], HangCollective] = {}
    for rank, state in waiting.items():
        one = state.waits_for
        if one is None or one.sequence is None:
            continue
        shape = None if one.kind in _UNEVEN else (str(one.input_sizes), one.dtype)
        key = (one.group, one.sequence, one.kind, shape)
        first.setdefault(key, one)
        places[one.group, one.sequence].setdefault(key, []).append(rank)
    for alike in places.values():
        if len(alike) > 1:
            order = sorted(alike, key=lambda key: len(alike[key]))
            return tuple((first[key], tuple(alike[key])) for key in order)
    return ()
