"""What dynamo compiled: how long it took, what it compiled again and why, and what it left."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from stepscope.records.compiled import FailedGuard, Recompiled, RunsEager
from stepscope.records.lazy_pattern import lazy_pattern

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.records.compiled import Compilation
    from stepscope.records.place import Place

_LIMIT = ("recompile limit", "recompile_limit", "cache_size_limit", "CacheSizeLimit")
_MOST_GUARDS = 4
_NUMBER = lazy_pattern(r" == |\. expected ")


def list_recompiled(compilations: Sequence[Compilation]) -> tuple[Recompiled, ...]:
    """Functions that were compiled more than once, the longest compiled first."""
    by_function: dict[str, list[Compilation]] = {}
    for one in compilations:
        by_function.setdefault(_frame(one), []).append(one)
    found = [_recompiled(same) for same in by_function.values() if any(one.again for one in same)]
    return tuple(sorted(found, key=lambda one: -one.seconds))


def _frame(one: Compilation) -> str:
    """`3/1` is the second compilation of function 3."""
    return (one.region or "").rpartition("/")[0] or f"{one.function} {one.place}"


def _recompiled(same: Sequence[Compilation]) -> Recompiled:
    again = [one for one in same if one.again]
    named = next((one for one in same if one.function), same[0])
    places = {_shared(one.guard): one.guard_place for one in reversed(again) if one.guard_place}
    guards = Counter(
        (guard, one.guard_place or places.get(guard))
        for one in again
        if (guard := _shared(one.guard))
    )
    return Recompiled(
        function=named.function or "not known",
        place=named.place,
        times=count_compiled([one for one in again if not one.failed]),
        seconds=sum(one.seconds or 0.0 for one in again),
        guards=tuple(
            FailedGuard(guard=guard, place=place, times=times)
            for (guard, place), times in guards.most_common(_MOST_GUARDS)
        ),
        gave_up=any(_is_limit(one) for one in again),
    )


def _shared(guard: str | None) -> str:
    """Guards on one value that differ in the number: `len(log) == 7` and `len(log) == 8`."""
    return _NUMBER.split(guard or "", maxsplit=1)[0]


def count_compiled(compilations: Iterable[Compilation]) -> int:
    """A function's backward has a record of its own when it is compiled later."""
    names = [one.region for one in compilations]
    return len({name for name in names if name}) + names.count(None)


def list_eager(compilations: Iterable[Compilation]) -> tuple[RunsEager, ...]:
    """Functions that torch gave up on, for another reason than too many compilations."""
    found: dict[tuple[str, Place | None], RunsEager] = {}
    for one in compilations:
        if one.failed and not _is_limit(one):
            function = one.function or "not known"
            eager = RunsEager(function=function, place=one.place, reason=one.failed)
            found.setdefault((function, one.place), eager)
    return tuple(found.values())


def _is_limit(one: Compilation) -> bool:
    return one.failed is not None and any(word in one.failed for word in _LIMIT)


def compile_seconds(
    compilations: Sequence[Compilation],
) -> tuple[float | None, float | None, float | None]:
    """All of them, those that no cache had, and those that came from a cache. None: not known."""
    known = [one for one in compilations if one.seconds is not None]
    if not known:
        return None, None, None
    total = sum(one.seconds or 0.0 for one in known)
    cached = sum(one.seconds or 0.0 for one in known if one.cached)
    if all(one.cached is None for one in known):
        return total, None, None
    return total, total - cached, cached
