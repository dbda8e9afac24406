"""When every rank arrived at the collectives of the whole run, step by step.

A collective is the same one on all ranks of its group when its number is. Where ranks wait at every
collective, each one starts them together, so a step's latenesses add up. Where they go on (DDP's
buckets, all of NCCL's), lateness grows until they next wait: the collective with the arrivals
furthest apart shows a step's lateness.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.records.run_calls import RunArrivals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from stepscope.records.run_calls import RunCalls

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

_CUT_LOG = 0.5  # of the usual number of calls: a rank with fewer is left out


class _GroupSteps(msgspec.Struct, frozen=True, kw_only=True):
    members: list[int]  # ranks
    number: Ints
    late_ns: Floats  # (steps, members)
    wait_ns: Floats
    spread_ns: Floats  # (steps,)


def join_arrivals(runs: Mapping[int, RunCalls]) -> RunArrivals | None:
    """`runs` holds every rank's calls, on one clock. None where no two ranks share a collective."""
    names = dict.fromkeys(name for run in runs.values() for name in run.groups)
    blocking = all(run.blocking for run in runs.values())
    joined = [_join_group(runs, name, blocking=blocking) for name in names]
    groups = [group for group in joined if group is not None]
    if not groups:
        return None
    ranks = sorted({rank for group in groups for rank in group.members})
    number = reduce(np.union1d, (group.number for group in groups))
    late, wait = (np.full((len(number), len(ranks)), np.nan) for _ in range(2))
    widest = np.full(late.shape, -1.0)
    for group in groups:
        rows = np.searchsorted(number, group.number)[:, None]
        place = np.ix_(rows[:, 0], np.searchsorted(ranks, group.members))
        if blocking:
            late[place] = np.nan_to_num(late[place]) + group.late_ns
            wait[place] = np.nan_to_num(wait[place]) + group.wait_ns
            continue
        wider = group.spread_ns[:, None] > widest[place]
        late[place] = np.where(wider, group.late_ns, late[place])
        wait[place] = np.where(wider, group.wait_ns, wait[place])
        widest[place] = np.where(wider, group.spread_ns[:, None], widest[place])
    together = all(len(group.members) == len(ranks) for group in groups if len(group.number) > 1)
    return RunArrivals(
        ranks=tuple(ranks), number=number, late_ns=late, wait_ns=wait, together=together
    )


def waits_by_step(arrivals: RunArrivals) -> dict[int, tuple[Ints, Ints]]:
    """For each rank the numbers of steps, and what it waited in them for other ranks."""
    waits = {}
    for column, rank in enumerate(arrivals.ranks):
        known = np.isfinite(arrivals.wait_ns[:, column])
        wait = np.rint(arrivals.wait_ns[known, column]).astype(np.int64)
        waits[rank] = (arrivals.number[known], wait)
    return waits


def _join_group(runs: Mapping[int, RunCalls], name: str, *, blocking: bool) -> _GroupSteps | None:
    calls = {rank: _calls_of(run, name) for rank, run in runs.items() if name in run.groups}
    usual = float(np.median([len(sequence) for sequence, _, _ in calls.values()]))
    members = [rank for rank in sorted(calls) if len(calls[rank][0]) > _CUT_LOG * usual]
    if len(members) < 2:
        return None
    common = reduce(_common, (calls[rank][0] for rank in members))
    if not len(common):
        return None
    places = [np.searchsorted(calls[rank][0], common) for rank in members]
    arrival = np.stack(
        [calls[rank][1][place] for rank, place in zip(members, places, strict=True)], axis=1
    )
    first = arrival.min(axis=1, keepdims=True)
    since = (arrival - first).astype(float)  # exact: the differences are small
    number = calls[members[0]][2][places[0]]
    late = since - np.median(since, axis=1, keepdims=True)
    spread = since.max(axis=1)
    wait = spread[:, None] - since
    if blocking:
        return _summed(members, number, late, wait, spread)
    return _widest(members, number, late, wait, spread)


def _common(one: Ints, other: Ints) -> Ints:
    """Most ranks have logged the same calls."""
    return one if np.array_equal(one, other) else np.intersect1d(one, other, assume_unique=True)


def _calls_of(run: RunCalls, name: str) -> tuple[Ints, Ints, Ints]:
    """Sequence, arrival and step of a group's calls; of a number that is there twice, the first."""
    mine = run.group == run.groups.index(name)
    sequence, first = np.unique(run.sequence[mine], return_index=True)
    return sequence, run.arrival_ns[mine][first], run.number[mine][first]


def _widest(
    members: list[int], number: Ints, late: Floats, wait: Floats, spread: Floats
) -> _GroupSteps:
    order = np.lexsort((spread, number))
    last = np.append(np.diff(number[order]) > 0, True)
    rows = order[last]
    return _GroupSteps(
        members=members,
        number=number[rows],
        late_ns=late[rows],
        wait_ns=wait[rows],
        spread_ns=spread[rows],
    )


def _summed(
    members: list[int], number: Ints, late: Floats, wait: Floats, spread: Floats
) -> _GroupSteps:
    steps, place = np.unique(number, return_inverse=True)

    def add_up(values: Floats) -> Floats:
        total = np.zeros((len(steps), *values.shape[1:]))
        np.add.at(total, place, values)
        return total

    return _GroupSteps(
        members=members,
        number=steps,
        late_ns=add_up(late),
        wait_ns=add_up(wait),
        spread_ns=add_up(spread),
    )
