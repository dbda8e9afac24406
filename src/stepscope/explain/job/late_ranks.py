"""The stragglers of the whole run: when every rank arrived step by step, who is late, how
often, and by what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.explain.job.hosts import HostColumns, columns_by_host, hosts_of
from stepscope.explain.job.lateness import (
    LEAST_STEPS,
    LateHost,
    Lateness,
    LateRank,
    StepMatrices,
    find_late_hosts,
    merge_late_ranks,
)
from stepscope.records.job import (
    Cause,
    LatenessKind,
    RankPart,
    RunArrivals,
    RunCalls,
    Straggler,
    Stragglers,
    WorkerTimes,
)
from stepscope.records.normal import median, medians
from stepscope.step.arrays import Bools, Floats, Indices, Int64s
from stepscope.text.figures import milliseconds, percent
from stepscope.text.words import counted
from stepscope.trace.clock_offsets import align_runs

# What holds a rank back is read from the phases of its steps: other ranks spend their waiting in
# the backward pass, so that phase says nothing.

_COUNTED_RANK = 0.5  # of the steps: a rank that took part in fewer is left out
_NAMED_WAIT = 0.1  # of the lateness
_NAMED_PHASE = 0.3  # of the excess: a phase that explains less is not named
_WAITS = "backward"
_PHASES = {
    "data": "waiting for data",
    "forward": "its forward pass",
    "optimizer": "its optimizer",
    "other": "code outside the passes",
    "evaluation": "its evaluation",
    "checkpoint": "saving checkpoints",
    "gc": "garbage collection",
    "compile": "compiling",
}


class WholeRunLateness(msgspec.Struct, frozen=True, kw_only=True):
    """`arrivals` are None where no collectives of the run were captured, or hosts do not wait in
    them, `stragglers` where they are too few to judge. `clears`: who is not named is not late,
    whatever the window shows."""

    arrivals: RunArrivals | None = None
    stragglers: Stragglers | None = None
    clears: bool = False
    own_times: WorkerTimes | None = None  # None where `arrivals` are, and for groups of ranks


class _Case(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that all judged ranks took part in. Matrices are (steps, ranks)."""

    ranks: list[int]
    number: NDArray[np.int64]
    late_ns: Floats
    wait_ns: Floats
    step_ns: Floats
    phases_ns: dict[str, Floats]
    cpu_wait_ns: Floats | None
    together: bool
    hosts: dict[int, str]  # of ranks; all of them, or none

    @property
    def by_host(self) -> tuple[HostColumns, ...]:
        return columns_by_host(self.ranks, self.hosts)


class _Late(msgspec.Struct, frozen=True, kw_only=True):
    """Late hosts, and how late single ranks are apart from that."""

    hosts: tuple[LateHost, ...]
    ranks: Lateness


def judge_whole_run(parts: Sequence[RankPart]) -> WholeRunLateness:
    """Never raises because of its input: ranks and steps that do not fit are left out."""
    aligned = align_runs(parts)
    on_host = all(run.on_host for run in aligned.runs.values())
    arrivals = join_arrivals(aligned.runs) if len(aligned.runs) > 1 else None
    if arrivals is not None:
        arrivals = msgspec.structs.replace(arrivals, error_ns=_wait_errors(aligned.error_ns))
    waits = arrivals if on_host else None
    hosts = hosts_of(parts)
    case = _case(arrivals, aligned.runs, hosts) if arrivals is not None else None
    late = _find_late(case, on_host=on_host) if case is not None else None
    own_times = _own_times(case) if case is not None and on_host else None
    if case is None or late is None:
        return WholeRunLateness(arrivals=waits, own_times=own_times)
    everyone = len(case.ranks) == len(parts)
    return WholeRunLateness(
        arrivals=waits,
        stragglers=_stragglers(case, _beyond_clock_error(case, late, aligned.error_ns)),
        clears=everyone and on_host,
        own_times=own_times,
    )


def _own_times(case: _Case) -> WorkerTimes | None:
    """Each rank's steps without its waits for the last rank; None if ranks meet in groups only."""
    if not case.together:
        return None
    own = np.maximum(case.step_ns - case.wait_ns, 0.0)
    return WorkerTimes(
        workers=tuple(case.ranks),
        own_ns=tuple(np.ascontiguousarray(own.T)),
        side_by_side=True,
        source="every step",
    )


def _wait_errors(error_ns: Mapping[int, float]) -> dict[int, float]:
    """A wait is off by the error of the rank and of the one that it waited for."""
    if not error_ns:
        return {}
    second, worst = [0.0, *sorted(error_ns.values())][-2:]
    return {rank: own + (second if own == worst else worst) for rank, own in error_ns.items()}


def _beyond_clock_error(case: _Case, late: _Late, error_ns: Mapping[int, float]) -> _Late:
    """Without constant lateness that the clocks cannot resolve."""

    def resolved(rank: LateRank, columns: Sequence[int]) -> bool:
        error = max(error_ns.get(case.ranks[column], 0) for column in columns)
        return not rank.constant or rank.excess_ns > 2 * error

    hosts = tuple(one for one in late.hosts if resolved(one.late, one.host.columns))
    ranks = tuple(rank for rank in late.ranks.late if resolved(rank, (rank.place,)))
    return _Late(hosts=hosts, ranks=msgspec.structs.replace(late.ranks, late=ranks))


def _find_late(case: _Case, *, on_host: bool) -> _Late | None:
    """A process that runs ahead of its device may be late without anybody waiting for it, so there
    only single late steps that took longer count."""
    typical = median(case.step_ns)
    # Ranks of different groups have different work.
    cpu_wait, own = (case.cpu_wait_ns, _own_work(case)) if case.together else (None, None)
    matrices = StepMatrices(arrival_ns=case.late_ns, cpu_wait_ns=cpu_wait, own_ns=own)
    hosts = tuple(
        late
        for late in find_late_hosts(matrices, case.by_host, typical)
        if on_host or (not late.late.constant and _lengthens(case, late.late))
    )
    rest = matrices.without(hosts) if hosts else matrices
    lateness = rest.find_late(typical)
    if lateness is None:
        return None
    if on_host:
        merged, ranks = merge_late_ranks(rest, case.by_host, lateness, typical)
        return _Late(hosts=(*hosts, *merged), ranks=ranks)
    late = tuple(rank for rank in lateness.late if not rank.constant and _lengthens(case, rank))
    wandering = lateness.wandering
    if wandering is not None and not _lengthens(case, wandering):
        wandering = None
    ranks = msgspec.structs.replace(lateness, late=late, wandering=wandering)
    return _Late(hosts=hosts, ranks=ranks)


def _lengthens(case: _Case, rank: LateRank) -> bool:
    """Whether late steps, or the steps after them, take longer on all ranks."""
    step = case.step_ns.min(axis=1)
    longest = np.maximum(step, np.append(step[1:], step[-1]))
    longer = median(longest[rank.late]) - median(step)
    return longer >= rank.excess_ns / 2


def decide(
    window: Stragglers, whole: WholeRunLateness, slow_links: Sequence[Straggler] = ()
) -> Stragglers:
    """Hundreds of steps decide which rank is late; only the window shows a slow link of a group.

    `slow_links` are links between hosts that the connections' own counters show to be slow.
    """
    late = _decide_late(window, whole)
    if not slow_links:
        return late
    # Ranks behind a slow link leave a collective later and so arrive later at the next one.
    ranks = (
        one
        for one in late.ranks
        if one.cause != "link" and not (one.cost_ms < max(link.cost_ms for link in slow_links))
    )
    both = sorted((*slow_links, *ranks), key=lambda one: -one.cost_ms)
    return msgspec.structs.replace(late, verdict="found", ranks=tuple(both), detail="")


def _decide_late(window: Stragglers, whole: WholeRunLateness) -> Stragglers:
    run = whole.stragglers
    if run is None:
        return window
    links = tuple(link for link in window.ranks if link.cause == "link")
    if run.ranks:
        return run
    if links:
        return msgspec.structs.replace(window, ranks=links, wandering=run.wandering)
    if whole.clears or window.verdict == "none":
        return run
    return msgspec.structs.replace(window, wandering=run.wandering)


def _case(
    arrivals: RunArrivals, runs: Mapping[int, RunCalls], hosts: Mapping[int, str]
) -> _Case | None:
    """Steps that all ranks have, without ranks that took part in few of them."""
    present = np.isfinite(arrivals.late_ns)
    often = np.flatnonzero(present.mean(axis=0) >= _COUNTED_RANK)
    ranks = [arrivals.ranks[place] for place in often.tolist()]
    rows: Bools = np.logical_and.reduce(present[:, often], axis=1)
    for rank in ranks:
        rows &= np.isin(arrivals.number, runs[rank].steps)
    if len(ranks) < 2 or rows.sum() < LEAST_STEPS:
        return None
    rows &= _possible(arrivals, rows, often, [runs[rank] for rank in ranks])
    if rows.sum() < LEAST_STEPS:
        return None
    number = arrivals.number[rows]
    places = [np.searchsorted(runs[rank].steps, number) for rank in ranks]

    def matrix(columns: list[NDArray[np.int64]]) -> Floats:
        picked = [column[place] for column, place in zip(columns, places, strict=True)]
        return np.stack(picked, axis=1).astype(float)

    phases = dict.fromkeys(phase for rank in ranks for phase in runs[rank].phases_ns)
    zero = {rank: np.zeros(len(runs[rank].steps), np.int64) for rank in ranks}
    waits = [runs[rank].cpu_wait_ns for rank in ranks]
    known = [wait for wait in waits if wait is not None]
    return _Case(
        ranks=ranks,
        number=number,
        late_ns=arrivals.late_ns[rows][:, often],
        wait_ns=arrivals.wait_ns[rows][:, often],
        step_ns=matrix([runs[rank].step_ns for rank in ranks]),
        phases_ns={
            phase: matrix([runs[rank].phases_ns.get(phase, zero[rank]) for rank in ranks])
            for phase in phases
        },
        cpu_wait_ns=matrix(known) if len(known) == len(ranks) else None,
        together=arrivals.together,
        hosts={rank: hosts[rank] for rank in ranks if rank in hosts},
    )


def _possible(arrivals: RunArrivals, rows: Bools, ranks: Indices, runs: list[RunCalls]) -> Bools:
    """No rank that waits does so for longer than its step takes, unless a clock was set."""
    possible = rows.copy()
    for column, run in zip(ranks.tolist(), runs, strict=True):
        if run.on_host:
            place = np.searchsorted(run.steps, arrivals.number[rows])
            possible[rows] &= arrivals.wait_ns[rows, column] <= run.step_ns[place]
    return possible


def _own_work(case: _Case) -> Floats | None:
    own = [ns for phase, ns in case.phases_ns.items() if phase != _WAITS]
    return np.sum(own, axis=0) if own and _WAITS in case.phases_ns else None


def _stragglers(case: _Case, late: _Late) -> Stragglers:
    lateness = late.ranks
    wandering = _describe_wandering(case, lateness.wandering) if lateness.wandering else None
    hosts = [_slow_host(case, host) for host in late.hosts]
    ranks = [_slow_rank(case, rank) for rank in lateness.late]
    named = tuple(sorted((*hosts, *ranks), key=lambda one: -one.cost_ms))
    if named:
        return Stragglers(verdict="found", ranks=named, source="every step", wandering=wandering)
    least = percent(lateness.least_ns / median(case.step_ns))
    steps = counted(lateness.steps, "step")
    detail = f"none is late by more than {least} of the step in {steps} of the whole run"
    return Stragglers(verdict="none", detail=detail, source="every step", wandering=wandering)


def _slow_rank(case: _Case, rank: LateRank) -> Straggler:
    number = case.ranks[rank.place]
    straggler = _straggler(case, rank, (rank.place,))
    host = case.hosts.get(number)
    several = {*case.hosts.values()} - {host}
    alone = several and [*case.hosts.values()].count(host or "") == 1
    only = (f"it is the only rank on {host}",) if alone else ()
    evidence = (*straggler.evidence, *only)
    return msgspec.structs.replace(straggler, rank=number, host=host, evidence=evidence)


def _slow_host(case: _Case, host: LateHost) -> Straggler:
    straggler = _straggler(case, host.late, host.host.columns)
    ranks = tuple(case.ranks[column] for column in host.host.columns)
    return msgspec.structs.replace(straggler, scope="host", host=host.host.host, ranks=ranks)


def _straggler(case: _Case, rank: LateRank, columns: tuple[int, ...]) -> Straggler:
    """One rank, or the ranks of one host: as one that is late by their mean."""
    steps, of = int(rank.late.sum()), len(rank.late)
    rows = np.ones(of, np.bool_) if rank.constant else rank.late
    # What each phase takes longer on these ranks than on the others, in these steps.
    longer = {}
    for phase, ns in case.phases_ns.items():
        if phase != _WAITS:
            others = medians(np.delete(ns[rows], columns, axis=1), axis=1)
            mine = ns[rows][:, list(columns)].mean(axis=1)
            # Without the highest and the lowest tenth.
            ordered = np.sort(mine - others)
            cut = len(ordered) // 10
            longer[phase] = float(ordered[cut : len(ordered) - cut].mean())
    fed_later = longer.get("data", 0.0)
    # Phases include waiting for cores, of which every phase gets its share.
    all_longer = sum(max(ns, 0.0) for ns in longer.values())
    fed = fed_later >= max(rank.excess_ns, all_longer) / 2
    cause: Cause = "input" if fed else "compute"
    own = median(np.delete(case.step_ns - case.wait_ns, columns, axis=1))
    kind: LatenessKind = "constant" if rank.constant else "intermittent"
    # The phase that explains most of the lateness, if one does.
    known = {phase: ns for phase, ns in longer.items() if phase in _PHASES and phase != "data"}
    most = max(known, key=lambda phase: known[phase], default=None)
    if most is None or known[most] < _NAMED_PHASE * rank.excess_ns:
        name_phase: tuple[str, ...] = ()
    else:
        name_phase = (
            f"{_PHASES[most]} takes {milliseconds(known[most] / 1e6)} longer than on the others",
        )
    return Straggler(
        rank=None,
        cause=cause,
        slowdown=1 + rank.excess_ns / max(own, 1.0),
        cost_ms=rank.cost_ns / 1e6,
        steps=steps,
        of=of,
        evidence=(
            *_how_often(rank, steps, of, len(columns)),
            *name_phase,
            f"{percent(max(fed_later, 0.0) / max(rank.excess_ns, all_longer))} of the extra time "
            "is waiting for data",
        ),
        kind=kind,
        one_in=None if rank.constant else max(1, round(of / max(steps, 1))),
        excess_ms=rank.excess_ns / 1e6,
        p_value=rank.p_value,
        source="every step",
    )


def _how_often(rank: LateRank, steps: int, of: int, ranks: int) -> tuple[str, ...]:
    by = milliseconds(rank.arrived_ns / 1e6)
    often = f"in {steps} of {counted(of, 'step')} of the whole run"
    arrives = "arrives" if ranks == 1 else f"its {ranks} ranks arrive"
    if not rank.constant:
        return (f"{arrives} {by} later than usual {often}",)
    others = "the other ranks" if ranks == 1 else "those of the other hosts"
    words = f"{arrives} {by} after {others} on average, and after their median {often}"
    if rank.for_cores_ns < _NAMED_WAIT * rank.arrived_ns:
        return (words,)
    waits = "it waits" if ranks == 1 else "they wait"
    return words, f"{milliseconds(rank.for_cores_ns / 1e6)} of that {waits} for a free core"


def _describe_wandering(case: _Case, rank: LateRank) -> Straggler:
    steps, of = int(rank.late.sum()), len(rank.late)
    one_in = max(1, round(of / max(steps, 1)))
    own = median(case.step_ns - case.wait_ns)
    return Straggler(
        rank=None,
        cause="compute",
        slowdown=1 + rank.excess_ns / max(own, 1.0),
        cost_ms=rank.cost_ns / 1e6,
        steps=steps,
        of=of,
        evidence=(
            f"some rank arrives {milliseconds(rank.excess_ns / 1e6)} later than usual in {steps} "
            f"of {counted(of, 'step')} of the whole run, and none more often than chance explains",
            *_waiting_for_cores(case, rank),
        ),
        kind="wandering",
        one_in=one_in,
        excess_ms=rank.excess_ns / 1e6,
        source="every step",
    )


def _waiting_for_cores(case: _Case, rank: LateRank) -> tuple[str, ...]:
    if case.cpu_wait_ns is None:
        return ()
    last = case.late_ns.argmax(axis=1)
    rows = np.arange(len(last))
    usual = median(case.cpu_wait_ns)
    waited = float(np.mean((case.cpu_wait_ns[rows, last] - usual)[rank.late]))
    if waited < rank.excess_ns / 2:
        return ()
    return (f"{milliseconds(waited / 1e6)} of that the rank waits for a free core",)


# When every rank arrived at the collectives of the whole run, step by step.
#
# A collective is the same one on all ranks of its group when its number is. Where ranks wait at
# every collective, each one starts them together, so a step's latenesses add up. Where they go on
# (DDP's buckets, all of NCCL's), lateness grows until they next wait: the collective with the
# arrivals furthest apart shows a step's lateness.

_CUT_LOG = 0.5  # of the usual number of calls: a rank with fewer is left out


class _GroupSteps(msgspec.Struct, frozen=True, kw_only=True):
    members: list[int]  # ranks
    number: Int64s
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


def waits_by_step(arrivals: RunArrivals) -> dict[int, tuple[Int64s, Int64s]]:
    """For each rank the numbers of steps, and what it waited in them for other ranks."""
    waits = {}
    for column, rank in enumerate(arrivals.ranks):
        known = np.isfinite(arrivals.wait_ns[:, column])
        wait = np.rint(arrivals.wait_ns[known, column]).astype(np.int64)
        waits[rank] = (arrivals.number[known], wait)
    return waits


def _join_group(runs: Mapping[int, RunCalls], name: str, *, blocking: bool) -> _GroupSteps | None:
    calls = {rank: _calls_of(run, name) for rank, run in runs.items() if name in run.groups}
    usual = median([len(sequence) for sequence, _, _ in calls.values()])
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
    late = since - medians(since, axis=1)[:, None]
    spread = since.max(axis=1)
    wait = spread[:, None] - since
    if blocking:
        return _summed(members, number, late, wait, spread)
    return _widest(members, number, late, wait, spread)


def _common(one: Int64s, other: Int64s) -> Int64s:
    """Most ranks have logged the same calls."""
    return one if np.array_equal(one, other) else np.intersect1d(one, other, assume_unique=True)


def _calls_of(run: RunCalls, name: str) -> tuple[Int64s, Int64s, Int64s]:
    """Sequence, arrival and step of a group's calls; of a number that is there twice, the first."""
    mine = run.group == run.groups.index(name)
    sequence, first = np.unique(run.sequence[mine], return_index=True)
    return sequence, run.arrival_ns[mine][first], run.number[mine][first]


def _widest(
    members: list[int], number: Int64s, late: Floats, wait: Floats, spread: Floats
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
    members: list[int], number: Int64s, late: Floats, wait: Floats, spread: Floats
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
