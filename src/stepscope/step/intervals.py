"""Sets of intervals on the time line as pairs of int64 arrays: unions, differences, coverage.

A set is (starts, ends). `union` makes it disjoint and sorted; everything else expects that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepscope.step.arrays import Bools, Floats, Int64s

Set = tuple[Int64s, Int64s]

EMPTY: Set = (np.empty(0, np.int64), np.empty(0, np.int64))


def union(starts: Int64s, ends: Int64s) -> Set:
    """Disjoint, sorted; touching intervals become one."""
    if not len(starts):
        return EMPTY
    if (starts[1:] < starts[:-1]).any():
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)
    opens = np.flatnonzero(starts[1:] > reach[:-1]) + 1
    first = np.concatenate(([0], opens))
    last = np.concatenate((opens - 1, [len(starts) - 1]))
    return starts[first], reach[last]


def union_all(sets: Sequence[Set]) -> Set:
    """What any of the sets covers."""
    starts, ends = zip(EMPTY, *sets, strict=True)
    return union(np.concatenate(starts), np.concatenate(ends))


def length(of: Set) -> int:
    """Total time covered."""
    return int((of[1] - of[0]).sum())


def clip(of: Set, low: int, high: int) -> Set:
    """The part between two times. Intervals without length stay."""
    starts, ends = np.maximum(of[0], low), np.minimum(of[1], high)
    keep = starts <= ends
    return starts[keep], ends[keep]


def covered(of: Set, starts: Int64s, ends: Int64s) -> Int64s:
    """How much of each interval a disjoint set covers."""
    if not len(of[0]):
        return np.zeros(len(starts), np.int64)
    before = np.concatenate(([0], np.cumsum(of[1] - of[0])))

    def until(times: Int64s) -> Int64s:
        place = np.searchsorted(of[0], times, side="right") - 1
        at = np.maximum(place, 0)
        inside = np.minimum(times, of[1][at]) - of[0][at]
        return np.where(place >= 0, before[at] + inside, 0)

    return until(ends) - until(starts)


def length_outside(a: Set, b: Set) -> int:
    """The length of the part of a that b does not cover."""
    return length(a) - int(covered(b, *a).sum())


def length_before(of: Set, times: Int64s | Floats) -> Floats:
    """How much of a disjoint set lies before each time. Relative to the set's start, because a
    float cannot hold nanoseconds since 1970."""
    starts, ends = of
    if not len(starts):
        return np.zeros(len(times))
    edges = np.stack((starts, ends), axis=1).reshape(-1) - starts[0]
    total = np.cumsum(np.stack((np.zeros(len(starts)), ends - starts), axis=1).reshape(-1))
    return np.asarray(np.interp(times - starts[0], edges, total))


def gaps(of: Set) -> Set:
    """What lies between the intervals of a disjoint set."""
    return of[1][:-1], of[0][1:]


def sweep(sets: Sequence[Set]) -> tuple[Int64s, Int64s, Bools]:
    """Cut the time line at every edge: segment starts, lengths, and which sets cover each.

    The last array is (sets, segments); segments that no set covers are included.
    """
    edges = np.concatenate([edge for of in sets for edge in of])
    if not len(edges):
        return EMPTY[0], EMPTY[0], np.empty((len(sets), 0), np.bool_)
    edges.sort(kind="stable")  # it merges runs of sorted edges
    edges = edges[np.diff(edges, prepend=edges[0] - 1) > 0]
    starts, lengths = edges[:-1], np.diff(edges)
    return starts, lengths, np.stack([covers(of, starts) for of in sets])


def covers(of: Set, times: Int64s) -> Bools:
    """Whether each time lies in the set (start inclusive, end exclusive)."""
    if not len(of[0]):
        return np.zeros(len(times), np.bool_)
    place = np.searchsorted(of[0], times, side="right")
    begun = place > 0
    place -= begun  # in place: this is the largest array of a large trace
    return begun & (times < of[1][place])


def subtract(a: Set, b: Set) -> Set:
    """The part of a that b does not cover."""
    return _where(a, b, wanted=False)


def intersect(a: Set, b: Set) -> Set:
    """The part of a that b covers."""
    return _where(a, b, wanted=True)


def _where(a: Set, b: Set, *, wanted: bool) -> Set:
    if not len(b[0]):
        return EMPTY if wanted else union(*a)
    starts, lengths, cover = sweep((a, b))
    keep = cover[0] & (cover[1] == wanted)
    return union(starts[keep], starts[keep] + lengths[keep])
