"""Events of one run of a compiled graph, and the calls of its code that made them.

Both are in the same order. Kernels that Inductor wrote have their own names in a trace; a library's
call shows as an operator. What a CUDA graph replays has neither operators nor, for a library's
kernels, names that the code knows: those lie between kernels that it does know.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING

from stepscope.records.trace import ABSENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.compiled import GraphKernel


def align_operators(names: Sequence[str], kernels: Sequence[GraphKernel]) -> list[int]:
    """For each operator right inside the graph's run: the call that it is, or -1."""
    known = {one.operator or one.name for one in kernels}
    present = set(names)
    wanted = [place for place, one in enumerate(kernels) if (one.operator or one.name) in present]
    seen = [place for place, name in enumerate(names) if name in known]
    found = [ABSENT] * len(names)
    code = [kernels[place].operator or kernels[place].name for place in wanted]
    if [names[place] for place in seen] == code:
        for place, call in zip(seen, wanted, strict=True):
            found[place] = call
        return found
    places: dict[str, list[int]] = {}
    for number, name in enumerate(code):
        places.setdefault(name, []).append(number)
    following = 0
    for place in seen:  # operators that the code does not have are left out
        calls = places.get(names[place], [])
        ahead = bisect_left(calls, following)
        if ahead < len(calls):
            found[place], following = wanted[calls[ahead]], calls[ahead] + 1
    return found


def align_kernels(
    names: Sequence[str], operator: Sequence[int], kernels: Sequence[GraphKernel]
) -> list[int]:
    """For each kernel on the device: the call that launched it, or -1.

    `operator` is the call by the operator around its launch, -1 where there is none.
    """
    found = list(operator)
    places: dict[str, list[int]] = {}
    for place, one in enumerate(kernels):
        if one.operator is None:
            places.setdefault(one.name, []).append(place)
    times: dict[str, int] = {}
    for event, name in enumerate(names):
        calls = places.get(name)
        if calls:
            number = times.get(name, 0)
            times[name] = number + 1
            found[event] = calls[number % len(calls)]
    _fill_between(found, kernels)
    return found


def _fill_between(found: list[int], kernels: Sequence[GraphKernel]) -> None:
    """Events between two known ones belong to the library's calls between these."""
    known = [event for event, call in enumerate(found) if call >= 0]
    edges = [(ABSENT, ABSENT), *((event, found[event]) for event in known)]
    edges.append((len(found), len(kernels)))
    for (event, call), (next_event, next_call) in pairwise(edges):
        unknown = range(event + 1, next_event)
        between = [n for n in range(call + 1, next_call) if kernels[n].operator is not None]
        for number, place in enumerate(unknown):
            if between:
                found[place] = between[number * len(between) // len(unknown)]
