"""Simulated jobs of many ranks: computed in true time, then read on each rank's own clock.

`make_job(Plan(...))` simulates a training loop event by event, all ranks at once. It returns what
each rank would have recorded (`parts`) and what really happened (`timeline`, `truth`). It shares
only the input records with the code under test.

True time is float nanoseconds since the first step may begin. A clock reads

    reading(t) = ZERO_NS + t + offset_ns + drift_ppm * 1e-6 * t    (+ a jump, + reading noise)

so a drift of +10 ppm gains 10 µs in each true second, and at t = 0 two clocks differ by exactly
their offsets.

    python -m tests.jobs --table      how often the right rank is found, and no other
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.hardware import CollectiveFit, Profile, Segment
from stepscope.records.job import CollectiveCalls, Group, RankPart, RankSteps, Rounds

if __package__:  # python -m tests.jobs, from the repository's root
    sys.path.insert(0, str(Path(__file__).parent))

from jobs_plan import (
    ABSENT,
    ALPHA_NS,
    BETA_NS,
    CALL_NS,
    FORMS,
    PIPELINES,
    Fault,
    FaultCause,
    Floats,
    Form,
    Ints,
    Layer,
    Plan,
    draw_plan,
    group_name,
    layers_of,
)
from jobs_world import Timeline, play

__all__ = [
    "FIRST_STEP",
    "FORMS",
    "PIPELINES",
    "ZERO_NS",
    "Clocks",
    "Fault",
    "FaultCause",
    "Form",
    "Job",
    "MeasuredSteps",
    "Plan",
    "Timeline",
    "draw_plan",
    "make_job",
    "profile_of",
]
ZERO_NS = 1_790_000_000_000_000_000
FIRST_STEP = 10


@dataclass(frozen=True, slots=True)
class Clocks:
    """Every rank's clock, and how to read it."""

    offset_ns: Floats
    drift_ppm: Floats
    jump_ns: Floats
    jump_at_ns: float

    def read(self, rank: Any, times: Floats) -> Ints:
        """What the clocks of these ranks show at these true times."""
        gained = self.offset_ns[rank] + self.drift_ppm[rank] * 1e-6 * times
        gained = gained + np.where(times > self.jump_at_ns, self.jump_ns[rank], 0.0)
        return np.asarray(ZERO_NS + np.rint(times + gained).astype(np.int64))

    def true_time(self, rank: int, reading_ns: int) -> float:
        """The true time at which a clock shows this, if it never jumped."""
        passed = reading_ns - ZERO_NS - self.offset_ns[rank]
        return float(passed / (1 + self.drift_ppm[rank] * 1e-6))

    def difference_ns(self, rank: int, reference: int, at_ns: int) -> float:
        """The rank's clock minus the reference's, when the reference's shows at_ns."""
        time = self.true_time(reference, at_ns)
        apart = self.offset_ns[rank] - self.offset_ns[reference]
        return float(apart + (self.drift_ppm[rank] - self.drift_ppm[reference]) * 1e-6 * time)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """The correct answer."""

    cause: str | None  # compute, input or link
    ranks: frozenset[int]  # who is slow; for a link, nobody
    group: str | None
    bubble: Floats  # (steps, ranks): the share of a step in which the rank neither works nor loads
    wait_ns: dict[int, float]  # by match: the mean wait of its ranks
    transfer_ns: dict[int, float]  # by match: from the last arrival to the mean end


@dataclass(frozen=True)
class Job:
    """A job as it happened, and as it was recorded."""

    plan: Plan
    timeline: Timeline
    clocks: Clocks
    parts: list[RankPart] = field(repr=False)

    @cached_property
    def truth(self) -> MeasuredSteps:
        return _truth(self.plan, self.timeline)


def make_job(plan: Plan) -> Job:
    """Simulate, then read each rank's clock."""
    timeline = play(plan)
    clocks = _clocks(plan, float(timeline.step_end.max()))
    return Job(plan=plan, timeline=timeline, clocks=clocks, parts=_parts(plan, timeline, clocks))


def profile_of(plan: Plan) -> Profile:
    """What `calibrate` would measure for this job's groups without a fault."""
    alpha_ns, beta_ns = ALPHA_NS[plan.backend], BETA_NS[plan.backend]
    sizes = sorted({layer.size for layer in layers_of(plan) if layer.size > 1})
    fits = [
        _fit(kind, size, alpha_ns * (1 + 0.25 * float(np.log2(size))), beta_ns)
        for size in sizes
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
    ]
    return Profile(
        host="node0",
        device="made up",
        kind="cuda",
        torch="2.13.0",
        when_unix=0.0,
        world_size=plan.ranks,
        backend=plan.backend,
        threads=1,
        matmul_flops={},
        fits=tuple(fits),
    )


def _fit(kind: str, size: int, alpha_ns: float, beta_ns: float) -> CollectiveFit:
    line = Segment(from_bytes=1024, to_bytes=1 << 30, alpha_ns=alpha_ns, beta_ns_per_byte=beta_ns)
    return CollectiveFit(
        kind=kind,
        group="world",
        group_size=size,
        segments=(line,),
        measured=(),
        passes=5,
        noise=0.05,
        held_out=0.05,
        held_out_sizes=0.05,
    )


def _clocks(plan: Plan, end_ns: float) -> Clocks:
    draw = np.random.default_rng([plan.seed, 1])
    jump = np.zeros(plan.ranks)
    if plan.jump is not None:
        jump[plan.jump[0]] = plan.jump[1]
    return Clocks(
        offset_ns=draw.uniform(-plan.offset_ns, plan.offset_ns, plan.ranks),
        drift_ppm=draw.uniform(-plan.drift_ppm, plan.drift_ppm, plan.ranks),
        jump_ns=jump,
        jump_at_ns=end_ns / 2,
    )


# What each rank recorded


@dataclass(frozen=True, slots=True)
class Hidden:
    """Compute done so far as a function of time, for every rank on one long axis."""

    apart: float
    edges: Floats
    done: Floats

    @classmethod
    def of(cls, timeline: Timeline) -> Hidden:
        apart = float(timeline.step_end.max()) + 1e9
        table = timeline.compute
        away = table["rank"] * apart
        edges = np.stack((table["start"] + away, table["end"] + away), 1).reshape(-1)
        took = np.stack((np.zeros(len(away)), table["end"] - table["start"]), 1)
        return cls(apart, edges, np.cumsum(took.reshape(-1)))

    def within(self, rank: NDArray[np.intp], start: Floats, end: Floats) -> Floats:
        """The part of these spans that their rank's compute covers."""
        away = rank * self.apart
        first, last = (np.interp(each + away, self.edges, self.done) for each in (start, end))
        return np.asarray(last - first)


def exposed_in_steps(plan: Plan, timeline: Timeline) -> Floats:
    """(steps, ranks): communication that no compute hides, each instant counted once."""
    calls, hidden = timeline.calls, Hidden.of(timeline)
    taken = calls["called"] + CALL_NS[plan.backend]  # on the CPU, the call itself is communication
    parts = ((calls["called"], taken), (calls["start"], calls["end"]))
    pairs = parts if CALL_NS[plan.backend] else parts[1:]
    rank, step = (np.tile(calls[name], len(pairs)) for name in ("rank", "step"))
    start, end = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    order = np.lexsort((start, rank))
    rank, step, start, end = (each[order] for each in (rank, step, start, end))
    away = rank * hidden.apart
    before = np.maximum.accumulate(np.concatenate(([-1e18], end + away)))[:-1] - away
    start = np.minimum(np.maximum(start, before), end)
    bare = end - start - hidden.within(rank, start, end)
    place = step * plan.ranks + rank
    sums = np.bincount(place, weights=bare, minlength=plan.steps * plan.ranks)
    return np.asarray(sums.reshape(plan.steps, plan.ranks), np.float64)


def _parts(plan: Plan, timeline: Timeline, clocks: Clocks) -> list[RankPart]:
    calls = _calls(plan, timeline, clocks)
    paces = _pace_columns(plan, timeline, clocks)
    edges = np.searchsorted(timeline.calls["rank"], np.arange(plan.ranks + 1)).tolist()
    groups = _groups(plan, timeline.layers)
    everyone = np.arange(plan.ranks)
    came, left = (clocks.read(everyone, times) for times in (timeline.came, timeline.left))
    parts = []
    for rank in range(plan.ranks):
        rows = slice(edges[rank], edges[rank + 1])
        parts.append(
            RankPart(
                rank=rank,
                calls=_calls_of_rank({name: each[rows] for name, each in calls.items()}, groups),
                pace=RankSteps(**{name: each[:, rank] for name, each in paces.items()}),
                rounds=tuple(
                    Rounds(
                        label=name, step=step, came_ns=came[i, :, rank], left_ns=left[i, :, rank]
                    )
                    for i, (name, step) in enumerate(_syncs(plan))
                ),
                host=f"node{rank // 8}",
                world_size=plan.ranks,
            )
        )
    return parts


def _syncs(plan: Plan) -> tuple[tuple[str, int], ...]:
    both = (("start", FIRST_STEP - 1), ("end", FIRST_STEP + plan.steps))
    return both if plan.rounds else ()


def _groups(plan: Plan, layers: tuple[Layer, ...]) -> list[Group]:
    return [
        Group(
            name=str(layer.first + place),
            description=layer.description,
            size=layer.size,
            ranks=tuple(members) if plan.tell_ranks else (),
        )
        for layer in layers
        for place, members in enumerate(layer.members.tolist())
    ]


def _noisy(plan: Plan, salt: int, times: Floats) -> Floats:
    """Times with reading errors."""
    if not plan.reading_ns:
        return times
    draw = np.random.default_rng([plan.seed, 5, salt])
    return np.asarray(times + draw.uniform(-plan.reading_ns, plan.reading_ns, times.shape))


def _calls(plan: Plan, timeline: Timeline, clocks: Clocks) -> dict[str, NDArray[Any]]:
    """The columns of CollectiveCalls for all ranks; `group` still counts all groups."""
    calls = timeline.calls
    rank = calls["rank"]
    read = {
        name: clocks.read(rank, _noisy(plan, salt, calls[name]))
        for salt, name in enumerate(("arrival", "start", "end"))
    }
    if plan.backend == "nccl":  # the kernel's time is both
        read["start"] = read["arrival"]
    start = np.maximum(read["start"], read["arrival"])
    end = np.maximum(read["end"], start)
    bare = calls["end"] - calls["start"]
    bare = bare - Hidden.of(timeline).within(rank, calls["start"], calls["end"])
    exposed = np.clip(np.rint(bare).astype(np.int64), 0, end - start)
    sequence = calls["sequence"] if plan.tell_sequence else np.full(len(rank), ABSENT, np.int64)
    return {
        **{name: calls[name] for name in ("kind", "group", "size_bytes", "peer", "step")},
        "sequence": sequence,
        "arrival_ns": read["arrival"],
        "start_ns": start,
        "end_ns": end,
        "exposed_ns": exposed,
    }


def _calls_of_rank(columns: dict[str, NDArray[Any]], groups: list[Group]) -> CollectiveCalls:
    used, place = np.unique(columns["group"], return_inverse=True)
    mine = tuple(groups[i] for i in used.tolist())
    told: dict[str, Any] = {**columns, "groups": mine, "group": place.astype(np.int32)}
    return CollectiveCalls(**told)


def _pace_columns(plan: Plan, timeline: Timeline, clocks: Clocks) -> dict[str, Ints]:
    """The columns of RankSteps, each (steps, ranks)."""
    rank = np.arange(plan.ranks)
    start = clocks.read(rank, _noisy(plan, 10, timeline.step_start))
    end = clocks.read(rank, _noisy(plan, 11, timeline.step_end))
    table = timeline.compute
    place = table["step"] * plan.ranks + table["rank"]
    size = plan.steps * plan.ranks
    compute = np.bincount(place, weights=table["end"] - table["start"], minlength=size)
    loading = timeline.input_end - timeline.step_start
    numbers = FIRST_STEP + np.arange(plan.steps)[:, None]
    return {
        "number": np.broadcast_to(numbers, (plan.steps, plan.ranks)).astype(np.int64),
        "start_ns": start,
        "dur_ns": end - start,
        "compute_ns": np.rint(compute.reshape(plan.steps, plan.ranks)).astype(np.int64),
        "exposed_comm_ns": np.rint(exposed_in_steps(plan, timeline)).astype(np.int64),
        "input_ns": np.rint(loading).astype(np.int64),
    }


# The truth


def _truth(plan: Plan, timeline: Timeline) -> MeasuredSteps:
    fault = plan.fault
    cause = None if fault is None else {"stage": "compute"}.get(fault.cause, fault.cause)
    ranks: frozenset[int] = frozenset()
    group = None
    if fault is not None and fault.cause == "stage":
        first = fault.place * plan.replicas
        ranks = frozenset(range(first, first + plan.replicas))
    elif fault is not None and fault.cause == "link":
        group = group_name(timeline.layers, fault.layer, fault.place)
    elif fault is not None:
        ranks = frozenset((fault.place,))
    wait, transfer = _waits(timeline)
    return MeasuredSteps(
        cause=cause,
        ranks=ranks,
        group=group,
        bubble=_bubble(plan, timeline),
        wait_ns=wait,
        transfer_ns=transfer,
    )


def _bubble(plan: Plan, timeline: Timeline) -> Floats:
    table = timeline.compute
    place = table["step"] * plan.ranks + table["rank"]
    size = plan.steps * plan.ranks
    work = np.bincount(place, weights=table["end"] - table["start"], minlength=size)
    took = timeline.step_end - timeline.step_start
    used = work.reshape(took.shape) + timeline.input_end - timeline.step_start + plan.other_ns
    return np.asarray(1 - used / took)


def _waits(timeline: Timeline) -> tuple[dict[int, float], dict[int, float]]:
    """For every match: the mean wait, and the time from the last arrival to the mean end."""
    calls = timeline.calls
    match = calls["match"]
    count = np.bincount(match)
    last = np.full(len(count), -np.inf)
    np.maximum.at(last, match, calls["arrival"])
    wait = np.bincount(match, weights=last[match] - calls["arrival"]) / count
    transfer = np.bincount(match, weights=calls["end"]) / count - last
    return dict(enumerate(wait.tolist())), dict(enumerate(transfer.tolist()))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from jobs_table import main

    main()
