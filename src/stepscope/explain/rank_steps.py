"""One rank's steps, divided into its own time and waiting, so that ranks can be compared.

Ranks that synchronise all take as long as the slowest one. A rank's own time is its step without
exposed communication: the slowest rank has the most of it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain import intervals
from stepscope.explain.work import DATA_LOADING, rows_named, spans_of
from stepscope.records.job import RankSteps, RankTimes
from stepscope.records.trace import HostKind

if TYPE_CHECKING:
    from stepscope.explain.arrays import Bools, Int64s
    from stepscope.explain.intervals import Set
    from stepscope.explain.work import Work
    from stepscope.records.explanation import RankExplanation, Steps
    from stepscope.records.trace import Trace

_NUMBER = re.compile(r"#(\d{1,18})(?!\d)")


def measure_rank_steps(trace: Trace, work: Work, steps: Steps) -> RankSteps:
    """By device cycles where there are any, by marked steps on the CPU, else the whole window."""
    edges, numbers = step_edges(steps, work)
    busy = (work.compute, work.comm, work.memory, _loading(trace, work))
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
        return float(np.median(column)) / 1e6 if len(column) else 0.0

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


def _loading(trace: Trace, work: Work) -> Set:
    host = trace.host
    named = rows_named(trace, host, host.kind == HostKind.ANNOTATION, DATA_LOADING.search)
    return spans_of(host, named & work.feeds(host.thread))
