"""An all-reduce in parts: reduced inside each host, then between hosts, then spread inside again.

A rank shows it as a reduce-scatter (or reduce) in a group inside its host, an all-reduce of what is
left in a group with ranks of other hosts, and an all-gather (or broadcast) in the first group. With
sharded parameters (HSDP) the last part is missing: parameters are gathered when needed.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stepscope.explain.hosts import reach_of
from stepscope.records.hierarchical import HierarchicalAllReduce
from stepscope.records.job import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stepscope.records.job import CollectiveCalls, RankPart

_FIRST = {"reduce_scatter": "all_gather", "reduce": "broadcast"}  # and what spreads the result
_ALIKE = 0.02  # sizes may differ by padding


class _Call(NamedTuple):
    kind: str
    group: int
    size: int
    start: int
    end: int


class _Triple(NamedTuple):
    inside: _Call
    between: _Call
    spread: _Call | None


def find_hierarchical(
    parts: Sequence[RankPart], hosts: Mapping[int, str]
) -> tuple[HierarchicalAllReduce, ...]:
    """One record per form, message size and groups' sizes; the longest first."""
    if len(set(hosts.values())) < 2:
        return ()
    seen: dict[tuple[str, str | None, int, int, int], list[_Triple]] = defaultdict(list)
    taking_part: dict[tuple[str, str | None, int, int, int], set[int]] = defaultdict(set)
    steps = 0
    for part in parts:
        steps += len(part.pace)
        for triple in _triples(part.calls, hosts):
            near = part.calls.groups[triple.inside.group].size or 0
            far = part.calls.groups[triple.between.group].size or 0
            gather = triple.spread.kind if triple.spread else None
            key = (triple.inside.kind, gather, triple.inside.size, near, far)
            seen[key].append(triple)
            taking_part[key].add(part.rank)
    mean_steps = steps / max(1, len(parts))
    records = [
        _record(key, triples, sorted(taking_part[key]), mean_steps) for key, triples in seen.items()
    ]
    return tuple(sorted(records, key=lambda one: -(one.inside_ns + one.between_ns)))


def _record(
    key: tuple[str, str | None, int, int, int],
    triples: list[_Triple],
    ranks: list[int],
    steps: float,
) -> HierarchicalAllReduce:
    """Times are means over the ranks, per step."""
    reduce, gather, size, near, far = key
    per_step = max(1.0, steps * len(ranks))
    inside = sum(_length(t.inside) + (_length(t.spread) if t.spread else 0) for t in triples)
    between = sum(_length(t.between) for t in triples)
    return HierarchicalAllReduce(
        ranks=tuple(ranks),
        hosts=far,
        ranks_per_host=near,
        reduce=reduce,
        gather=gather,
        size_bytes=size,
        count=len(triples) / per_step,
        inside_ns=round(inside / per_step),
        between_ns=round(between / per_step),
    )


def _length(call: _Call) -> int:
    return call.end - call.start


def _triples(calls: CollectiveCalls, hosts: Mapping[int, str]) -> Iterable[_Triple]:
    near, far = (
        {place for place, group in enumerate(calls.groups) if _reach(group.ranks, hosts) == reach}
        for reach in ("inside host", "between hosts")
    )
    if not near or not far:
        return
    by_step: dict[int, list[_Call]] = defaultdict(list)
    for place in np.argsort(calls.start_ns, kind="stable").tolist():
        step = int(calls.step[place])
        if step >= 0 and int(calls.size_bytes[place]) > 0:
            by_step[step].append(
                _Call(
                    KINDS[int(calls.kind[place])],
                    int(calls.group[place]),
                    int(calls.size_bytes[place]),
                    int(calls.start_ns[place]),
                    int(calls.end_ns[place]),
                )
            )
    sizes = {place: len(calls.groups[place].ranks) for place in near}
    for in_step in by_step.values():
        yield from _join(in_step, near, far, sizes)


def _reach(ranks: Sequence[int], hosts: Mapping[int, str]) -> str | None:
    return reach_of(ranks, len(ranks), hosts) if len(ranks) > 1 else None


def _join(
    calls: list[_Call], near: set[int], far: set[int], sizes: dict[int, int]
) -> Iterable[_Triple]:
    """Each first part with the next all-reduce of its bytes, and the next call that spreads it."""
    used: set[int] = set()
    for place, first in enumerate(calls):
        if first.kind not in _FIRST or first.group not in near:
            continue
        left = first.size / (sizes[first.group] if first.kind == "reduce_scatter" else 1)
        middle = _next(calls, place + 1, used, {"all_reduce"}, far, left)
        if middle is None:
            continue
        used.add(middle)
        last = _next(calls, middle + 1, used, {_FIRST[first.kind]}, {first.group}, first.size)
        if last is not None:
            used.add(last)
        yield _Triple(first, calls[middle], calls[last] if last is not None else None)


def _next(
    calls: list[_Call],
    start: int,
    used: set[int],
    kinds: set[str],
    groups: set[int],
    size: float,
) -> int | None:
    for place in range(start, len(calls)):
        call = calls[place]
        alike = abs(call.size - size) <= _ALIKE * size
        if place not in used and call.kind in kinds and call.group in groups and alike:
            return place
    return None
