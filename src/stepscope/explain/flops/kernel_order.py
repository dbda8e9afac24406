"""Kernels of a graph's replay, joined to the operators of its recording by their order.

Products are the anchors: where a replay has as many of them as its recording, they are the same,
one by one; else product_order.py finds which are which. Between two products, kernels and operators
of one kind are joined in order where there are as many of both, or as many stretches of both. What
is not sure stays unknown.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from stepscope.explain.flops.kernel_kinds import (
    COPY,
    ONE_BY_ONE,
    SEVERAL,
    finishes,
    kernel_kind,
    operator_kinds,
    prepares,
)
from stepscope.explain.flops.memory_bound import VIEWS
from stepscope.explain.flops.product_order import assign_products
from stepscope.records.trace import ABSENT

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from stepscope.explain.flops.product_order import CapturedCall

_ROUNDS = 4


def join_by_order(
    calls: Sequence[CapturedCall], kernels: Sequence[str], multiplies: Sequence[bool]
) -> list[int]:
    """For each kernel of a replay the place of its operator in the recording, or -1.

    `multiplies` says which kernels are products.
    """
    found = _join_products(calls, kernels, multiplies)
    if all(place < 0 for place in found):
        return found
    for _ in range(_ROUNDS):  # what was joined bounds what was not
        before = found.count(ABSENT)
        _join_round(found, calls, kernels)
        if found.count(ABSENT) == before:
            break
    _give_helpers(found, kernels)
    return found


def _join_products(
    calls: Sequence[CapturedCall], kernels: Sequence[str], multiplies: Sequence[bool]
) -> list[int]:
    """One by one where there are as many of both, else as the order of all kernels allows."""
    anchors = [place for place, call in enumerate(calls) for _ in range(call.products)]
    products = [place for place, product in enumerate(multiplies) if product]
    if len(anchors) != len(products):
        return assign_products(calls, kernels, multiplies)
    found = [ABSENT] * len(kernels)
    for event, place in zip(products, anchors, strict=True):
        found[event] = place
    return found


def _join_round(found: list[int], calls: Sequence[CapturedCall], kernels: Sequence[str]) -> None:
    """Between kernels that are known already; operators run in the order of their recording."""
    known = [(event, place) for event, place in enumerate(found) if place >= 0]
    edges = [(ABSENT, ABSENT), *known, (len(kernels), len(calls))]
    used = set(found)
    for (event, place), (next_event, next_place) in pairwise(edges):
        events = range(event + 1, next_event)
        if not events:
            continue
        inside = range(place + 1, next_place)
        between = [one for one in inside if _works(calls[one]) and one not in used]
        if next_place < len(calls) and calls[next_place].name in SEVERAL:
            between.append(next_place)  # some of its kernels come before the one that is known
        if place >= 0 and calls[place].bias and place != next_place:
            between.insert(0, place)
        _join_between(found, events, between, calls, kernels)
        if not between and next_place < len(calls) and calls[next_place].name not in VIEWS:
            for one in events:  # an operator first copies what is not contiguous
                if kernel_kind(kernels[one]) == COPY:
                    found[one] = next_place


def _works(call: CapturedCall) -> bool:
    """It launches kernels, and none that multiplies."""
    return call.name not in VIEWS and not call.products


def _kinds(call: CapturedCall) -> tuple[str, ...]:
    return (call.bias,) if call.bias else operator_kinds(call.name)


def _join_between(
    found: list[int],
    events: range,
    places: Sequence[int],
    calls: Sequence[CapturedCall],
    kernels: Sequence[str],
) -> None:
    """Kind by kind: one by one where there are as many of both, else by stretches."""
    kinds = [(place, kind) for place in places for kind in _kinds(calls[place])]
    by_kind = _grouped(*zip(*kinds, strict=True)) if kinds else {}
    for kind, mine in _grouped(events, [kernel_kind(kernels[one]) for one in events]).items():
        others = (by_kind.get(other, []) for other in ONE_BY_ONE.get(str(kind), ()))
        candidates = by_kind.get(kind) or next((some for some in others if some), [])
        if len(candidates) == 1 or len(candidates) == len(mine):
            _spread(found, mine, candidates)
            continue
        order = {place: number for number, place in enumerate(places)}
        runs = _stretches(mine, mine)
        groups = _stretches(candidates, [order[place] for place in candidates])
        if len(runs) == len(groups):
            for run, group in zip(runs, groups, strict=True):
                _spread(found, run, group)


def _spread(found: list[int], events: Sequence[int], places: Sequence[int]) -> None:
    """Each operator gets as many kernels; nothing where they cannot be divided so."""
    each, rest = divmod(len(events), len(places))
    if not rest:
        for number, event in enumerate(events):
            found[event] = places[number // each]


def _stretches(items: Sequence[int], numbers: Sequence[int]) -> list[list[int]]:
    """Items whose numbers follow each other without a gap."""
    keyed = [
        (number - at, item) for at, (number, item) in enumerate(zip(numbers, items, strict=True))
    ]
    return [[item for _, item in run] for _, run in groupby(keyed, key=lambda one: one[0])]


def _grouped(items: Sequence[int], keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for item, key in zip(items, keys, strict=True):
        groups.setdefault(key, []).append(item)
    return groups


def _give_helpers(found: list[int], kernels: Sequence[str]) -> None:
    """An operator clears its workspace right before its kernel, and its other kernels lie between
    those that are known to be its own."""
    for event in range(1, len(found)):
        if found[event] < 0 and finishes(kernels[event]):
            found[event] = found[event - 1]
    for event in range(len(found) - 2, ABSENT, -1):
        if found[event] < 0 and prepares(kernels[event]):
            found[event] = found[event + 1]
    known = [event for event, place in enumerate(found) if place >= 0]
    for event, after in pairwise(known):
        if found[event] == found[after]:
            found[event + 1 : after] = [found[event]] * (after - event - 1)
