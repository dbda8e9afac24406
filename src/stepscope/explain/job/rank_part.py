"""One rank's part of its job: its steps divided into own time and waiting, its collectives
of the whole run, what it trains and exchanges.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from stepscope.records.explanation import RankExplanation, Steps
from stepscope.records.job import (
    CollectiveCalls,
    LoggedCollectives,
    Membership,
    RankFolder,
    RankPart,
    RankSteps,
    RankTimes,
    RunCalls,
)
from stepscope.records.normal import median
from stepscope.records.rank import StepColumns
from stepscope.records.trace import HostKind, Trace
from stepscope.step import intervals
from stepscope.step.arrays import Bools, Int64s
from stepscope.step.work import COMM_SPAN, DATA_LOADING, Work, rows_named, spans_of

# One rank's steps, divided into its own time and waiting, so that ranks can be compared.
#
# Ranks that synchronise all take as long as the slowest one. A rank's own time is its step without
# exposed communication: the slowest rank has the most of it.

_NUMBER = re.compile(r"#(\d{1,18})(?!\d)")


def measure_rank_steps(trace: Trace, work: Work, steps: Steps) -> RankSteps:
    """By device cycles where there are any, by marked steps on the CPU, else the whole window."""
    edges, numbers = step_edges(steps, work)
    host = trace.host
    named = rows_named(trace, host, host.kind == HostKind.ANNOTATION, DATA_LOADING.search)
    busy = (work.compute, work.comm, work.memory, spans_of(host, named & work.feeds(host.thread)))
    sets = [intervals.clip(spans, int(edges[0]), int(edges[-1])) for spans in busy]
    cuts = (edges[:-1], edges[1:])  # so that no segment crosses from one step into the next
    starts, lengths, (compute, comm, memory, loading, _) = intervals.sweep([*sets, cuts])
    which = np.searchsorted(edges, starts, side="right") - 1
    # On the CPU, operators inside the data loader are its work; a device waits only while it idles.
    waits = loading & ~comm if work.on_host else loading & ~(compute | comm | memory)

    def per_step(chosen: Bools) -> Int64s:
        sums = np.bincount(which[chosen], weights=lengths[chosen], minlength=len(numbers))
        return sums.astype(np.int64)

    return RankSteps(
        number=numbers,
        start_ns=edges[:-1],
        dur_ns=np.diff(edges),
        compute_ns=per_step(compute & ~waits),
        exposed_comm_ns=per_step(comm & ~compute),
        input_ns=per_step(waits),
    )


def typical_step(pace: RankSteps) -> RankTimes:
    """Medians over the recorded steps; all zero where there are none."""

    def median_ms(column: Int64s) -> float:
        return median(column) / 1e6 if len(column) else 0.0

    step, own = median_ms(pace.dur_ns), median_ms(pace.own_ns)
    return RankTimes(
        step_ms=step,
        own_ms=own,
        exposed_comm_ms=step - own,
        compute_ms=median_ms(pace.compute_ns),
        input_ms=median_ms(pace.input_ns),
    )


def own_ms(rank: RankExplanation) -> float:
    """A rank's own time in a typical recorded step. Every surface takes it from here."""
    return typical_step(rank.part.pace).own_ms


def step_edges(steps: Steps, work: Work) -> tuple[Int64s, Int64s]:
    """Where the compared steps begin and end, back to back, and their numbers."""
    cycles = np.array(steps.cycles_ns, np.int64)
    if not len(cycles):
        return np.array(work.extent, np.int64), np.zeros(1, np.int64)
    edges = steps.window_start_ns + np.concatenate(([0], np.cumsum(cycles)))
    names = [step.name for step in steps.steps[steps.first_cycle :]][: len(cycles)]
    matches = map(_NUMBER.search, names)
    numbers = [int(match[1]) if match else place for place, match in enumerate(matches)]
    return edges, np.array(numbers, np.int64)


# One rank's collectives of the whole run, put into the steps that made them.
#
# Runs in the process that reads the rank. What comes back is small: at most MOST_CALLS collectives,
# the same ones on all ranks, and a few numbers for each step. All ranks together keep at most
# MOST_CELLS steps.

MOST_CALLS, MOST_STEPS = 20_000, 20_000
MANY_RANKS, FEWER = 64, 5  # with more ranks than that, a fifth of the calls and steps
# Of all ranks together, so that their columns and the matrices made of them fit in memory: with
# 10,000 ranks each one keeps 300 steps and 600 calls, and explaining them takes about 1 GB.
MOST_CELLS, CALLS_PER_STEP, LEAST_KEPT = 3_000_000, 2, 200
WARM_UP = 3  # steps
_STRETCH = 64  # calls, or steps, that are kept or left out together
_SHORT_STRETCH = 16  # steps, with many ranks
_GOLDEN = 0.6180339887498949  # multiples of it, without their whole parts, fill 0 to 1 evenly
_SLACK_NS = 1_000_000


def calls_of_folder(folder: RankFolder | None, steps: StepColumns | None) -> RunCalls | None:
    """None for a bare trace."""
    if folder is None:
        return None
    overlaps = bool(folder.layout.get("ddp"))
    world_size = folder.world_size
    return calls_of_run(folder.collectives, steps, asynchronous=overlaps, world_size=world_size)


def calls_of_run(
    log: LoggedCollectives | None,
    steps: StepColumns | None,
    *,
    asynchronous: bool = False,
    world_size: int | None = None,
) -> RunCalls | None:
    """None where either was not captured. `asynchronous`: DDP's buckets overlap its backward."""
    if log is None or steps is None or not len(log):
        return None
    usable = steps.plain & (steps.end_unix_ns > 0) & (steps.number >= WARM_UP)
    place = _step_of(log.created_ns, steps)
    kept = (place >= 0) & usable[place]
    on_host = all(name.startswith("gloo") for name in log.names)
    if (world_size or 0) > MANY_RANKS:
        if not on_host or asynchronous:
            # The first and the last call of every step and group: where no call
            # waits, lateness grows from one to the next, so these two show it.
            rows = np.flatnonzero(kept)
            if len(rows):
                order = rows[np.lexsort((log.sequence[rows], log.group[rows], place[rows]))]
                other = (np.diff(place[order]) != 0) | (np.diff(log.group[order]) != 0)
                ends: Bools = np.zeros(len(kept), np.bool_)
                ends[order[np.append(True, other)]] = True
                ends[order[np.append(other, True)]] = True
                kept = ends
        called: Bools = np.zeros(len(steps), np.bool_)
        called[place[kept]] = True
        usable &= called
        usable &= _sampled(steps.number, usable, int(kept.sum()), world_size or 1)
        kept &= usable[place]
    else:
        kept &= _thinned(log.sequence, kept, MOST_CALLS)
        usable &= _thinned(steps.number, usable, MOST_STEPS)
    if not kept.any() or not usable.any():
        return None
    return RunCalls(
        groups=log.groups,
        group=log.group[kept],
        sequence=log.sequence[kept],
        arrival_ns=log.created_ns[kept],
        number=steps.number[place[kept]],
        blocking=on_host and not asynchronous,
        on_host=on_host,
        steps=steps.number[usable],
        step_ns=steps.step_ns[usable],
        phases_ns={phase: ns[usable] for phase, ns in steps.phases_ns.items()},
        cpu_wait_ns=None if steps.cpu_wait_ns is None else steps.cpu_wait_ns[usable],
    )


def most_steps(world_size: int) -> int:
    """Steps of each rank that a large job keeps."""
    return min(MOST_STEPS // FEWER, max(LEAST_KEPT, MOST_CELLS // world_size))


def _sampled(number: Int64s, usable: Bools, calls: int, world_size: int) -> Bools:
    """Short stretches of steps, spread evenly over the run by number alone: a rank that keeps fewer
    keeps some of those that the others keep."""
    most, count = most_steps(world_size), int(usable.sum())
    share = min(1.0, most / max(count, 1), CALLS_PER_STEP * most / max(calls, 1))
    place = (number // _SHORT_STRETCH * _GOLDEN) % 1.0
    while share < 1.0 and int((usable & (place < share)).sum()) > most:
        share *= 0.95
    chosen: Bools = place < share
    return chosen


def _step_of(created_ns: Int64s, steps: StepColumns) -> Int64s:
    """The place of the step in which each call was made, -1 between two steps."""
    if not len(steps):
        return np.full(len(created_ns), -1, np.int64)
    order = np.argsort(steps.end_unix_ns, kind="stable")
    ends = steps.end_unix_ns[order]
    after = np.searchsorted(ends, created_ns)
    place = order[np.minimum(after, len(ends) - 1)]
    began = steps.end_unix_ns[place] - steps.wall_ns[place] - _SLACK_NS
    inside: Int64s = np.where((after < len(ends)) & (created_ns >= began), place, -1)
    return inside


def _thinned(number: Int64s, wanted: Bools, most: int) -> Bools:
    """Leave out whole stretches, by number alone, until at most `most` are left."""
    every = 1
    while int((wanted & _in_stretch(number, every)).sum()) > most:
        every *= 2
    return _in_stretch(number, every)


def _in_stretch(number: Int64s, every: int) -> Bools:
    chosen: Bools = (number // _STRETCH) % every == 0
    return chosen


# How one process takes part in its job: what it trains, and how much it exchanges.
#
# Only a run folder shows that. A bare trace without collectives may simply not have recorded them.

# Of the trained bytes. Summing a loss or norms is no exchange of gradients.
LEAST_SHARE = 0.01


def find_membership(
    folder: RankFolder | None, trace: Trace, calls: CollectiveCalls, pace: RankSteps
) -> Membership | None:
    """None for a bare trace, and for a capture without communication."""
    if folder is None or not folder.layout:
        return None
    layout = folder.layout
    trained = layout.get("trained") or {}
    tensors, shared = trained.get("tensors"), trained.get("shared_tensors")
    # Per step, by the trace or the flight recorder, whichever saw more: the trace lacks
    # gloo's calls on device tensors, the recorder lacks sends and receives.
    recorded = [line.get("size_bytes") for line in folder.comms]
    if (calls.size_bytes < 0).any() or None in recorded:
        exchanged_bytes = None
    elif not len(calls) and not folder.comms and any(map(COMM_SPAN.search, trace.strings)):
        exchanged_bytes = None  # there are calls of unknown size
    else:
        steps = len({line.get("step") for line in folder.comms})
        by_recorder = sum(int(size or 0) for size in recorded) // max(1, steps)
        exchanged_bytes = max(int(calls.size_bytes.sum()) // max(1, len(pace)), by_recorder)
    return Membership(
        pid=folder.pid,
        world_size=folder.world_size or 1,
        steps=folder.steps,
        groups=sum(int(group.get("size") or 0) > 1 for group in layout.get("groups") or ()),
        joined=any(
            layout.get(name)
            for name in ("ddp", "placements", "fsdp_modules", "pipeline_stages", "rpc", "libraries")
        ),
        trained_bytes=trained.get("size_bytes"),
        shared=None if not tensors or shared is None else shared == tensors,
        exchanged_bytes=exchanged_bytes,
        calls_before=sum((layout.get("flight_recorder") or {}).values()),
    )


def exchanges_gradients(member: Membership) -> bool | None:
    """Whether the process sends its gradients to others; None where that is not known."""
    if member.joined:
        return True
    if not member.exchanged_bytes:
        return None if member.exchanged_bytes is None else False
    if not member.trained_bytes:
        return None
    return member.exchanged_bytes >= LEAST_SHARE * member.trained_bytes


def train_apart(members: Sequence[Membership | None]) -> bool:
    """Whether several processes are known to train, and none of them sends its gradients."""
    return len(members) > 1 and all(
        member is not None and member.steps and exchanges_gradients(member) is False
        for member in members
    )


# A rank's part of the job where no trace shows its calls and steps.

_NONE: Any = np.zeros(0, np.int64)
_CALLS = CollectiveCalls(**dict.fromkeys(CollectiveCalls.__struct_fields__, _NONE) | {"groups": ()})
_PACE = RankSteps(**dict.fromkeys(RankSteps.__struct_fields__, _NONE))


def empty_part(**known: Any) -> RankPart:
    """All such parts share their empty columns."""
    return RankPart(calls=_CALLS, pace=_PACE, **known)
