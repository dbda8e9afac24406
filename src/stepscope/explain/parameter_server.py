"""Training through a parameter server: the workers' own times, who waits, how stale reads
are, and whether it pays.
"""

from __future__ import annotations

from functools import reduce

import msgspec
import numpy as np

from stepscope.records.change_values import Consistency
from stepscope.records.job import WorkerTimes
from stepscope.records.normal import median
from stepscope.records.parameter_server import (
    BlockedBy,
    LossPoint,
    ShardLoad,
    Staleness,
    Straggling,
    StragglingKind,
    TogetherEvents,
    TogetherSummary,
    TogetherVerdict,
    WorkerShare,
)
from stepscope.step.arrays import Floats, Int64s
from stepscope.text.figures import factor, milliseconds, percent, significant
from stepscope.text.words import counted, sentence

# A run through a parameter server, from its events: who waited, and whether it paid.

_MOST_POINTS = 200  # of the loss curve
_MOST_PAIRS = 100


def summarise_together(events: TogetherEvents) -> TogetherSummary | None:
    """None if no worker finished a step."""
    steps = list_steps(events)
    if not steps:
        return None
    rate = sum(len(one) / max(float(one.step_ns.sum()), 1.0) for one in steps) * 1e9
    straggling = find_straggling(worker_times(steps)) if len(steps) > 1 else None
    barrier = 1e3 * len(steps) / straggling.barrier_ms if straggling else None
    pulls, pushes = events.pulls, events.pushes
    starts = [pulls.at_unix_ns, pushes.at_unix_ns]
    ends = [pulls.at_unix_ns + pulls.blocked_ns + pulls.transfer_ns]
    ends += [pushes.at_unix_ns + pushes.took_ns]
    first_ns, last_ns = (
        min(int(one.min()) for one in starts if len(one)),
        max(int(one.max()) for one in ends if len(one)),
    )
    verdict, why = judge(events.consistency, rate, straggling)
    whole = sum(int(one.step_ns.sum()) for one in steps)
    blocked = sum(int(one.blocked_ns.sum()) for one in steps)
    gap = events.pulls.gap
    return TogetherSummary(
        consistency=str(events.consistency),
        verdict=verdict,
        why=why,
        optimizer=events.optimizer,
        compression=events.compression,
        updates=sum(map(len, steps)),
        span_s=(last_ns - first_ns) / 1e9,
        updates_per_s=rate,
        barrier_updates_per_s=barrier,
        blocked_share=blocked / max(whole, 1),
        staleness=Staleness.of(gap[gap >= 0]),
        straggling=straggling,
        workers=tuple(_share(events, one) for one in steps),
        blocks=_list_blocks(events),
        shards=_list_shards(events, last_ns - first_ns),
        losses=_list_losses(events, first_ns),
        evicted=events.evicted,
        restored=events.restored,
        lost_updates=events.lost_updates,
        notes=events.notes,
    )


def judge(
    consistency: Consistency, rate: float, straggling: Straggling | None
) -> tuple[TogetherVerdict, str]:
    """Whether running ahead gave more updates than a barrier would have, and why or why not."""
    if straggling is None:
        return "one worker", "One worker waits for nobody."
    gain = rate * straggling.barrier_ms / 1e3 / straggling.workers
    pays = gain >= 1 + WORTH
    effect = describe_effect(straggling, consistency, pays=pays)
    reason = f"{sentence(describe_straggling(straggling))}. {sentence(effect)}."
    if consistency.synchronous:
        return "barrier", reason
    if pays:
        times = f"{factor(gain)} times the updates per second of a barrier at every step"
        return "pays", f"{consistency} gives {times}. {reason}"
    moved = f"{percent(abs(gain - 1))} {'more' if gain >= 1 else 'fewer'} updates per second"
    return "does not pay", f"{consistency} gives {moved} than a barrier at every step. {reason}"


def _share(events: TogetherEvents, steps: WorkerSteps) -> WorkerShare:
    pulls, pushes = events.pulls, events.pushes
    read, sent = pulls.worker == steps.worker, pushes.worker == steps.worker
    gap = pulls.gap[read & (pulls.gap >= 0)]
    return WorkerShare(
        worker=steps.worker,
        steps=len(steps),
        whole_ns=int(steps.step_ns.sum()),
        blocked_ns=int(steps.blocked_ns.sum()),
        pull_ns=int(steps.pull_ns.sum()),
        compute_ns=int(steps.compute_ns.sum()),
        push_ns=int(steps.push_ns.sum()),
        other_ns=int(steps.other_ns.sum()),
        pulled_bytes=int(pulls.size_bytes[read].sum()),
        pushed_bytes=int(pushes.size_bytes[sent].sum()),
        mean_gap=float(gap.mean()) if len(gap) else None,
        resent=int(pushes.resent[sent].sum()),
    )


def _list_blocks(events: TogetherEvents) -> tuple[BlockedBy, ...]:
    pulls = events.pulls
    rows = np.flatnonzero((pulls.blocked_ns > 0) & (pulls.waited_for >= 0))
    pairs, place = np.unique(
        np.stack((pulls.worker[rows], pulls.waited_for[rows]), axis=1), axis=0, return_inverse=True
    )
    blocked = np.zeros(len(pairs), np.int64)
    np.add.at(blocked, place.reshape(-1), pulls.blocked_ns[rows])
    times = np.bincount(place.reshape(-1), minlength=len(pairs))
    order = np.argsort(-blocked, kind="stable")[:_MOST_PAIRS].tolist()
    return tuple(
        BlockedBy(
            worker=int(pairs[i, 0]),
            by=int(pairs[i, 1]),
            blocked_ns=int(blocked[i]),
            times=int(times[i]),
        )
        for i in order
    )


def _list_shards(events: TogetherEvents, span_ns: int) -> tuple[ShardLoad, ...]:
    applied, served = events.applied, events.served
    seen = {*np.unique(applied.shard).tolist(), *np.unique(served.shard).tolist()}
    loads = []
    for shard in sorted(seen | {*events.shard_bytes}):
        updates, pulls = applied.shard == shard, served.shard == shard
        took = int(applied.took_ns[updates].sum()) + int(served.took_ns[pulls].sum())
        queue = np.concatenate((applied.queue[updates], served.queue[pulls]))
        waited = np.concatenate((applied.waited_ns[updates], served.waited_ns[pulls]))
        loads.append(
            ShardLoad(
                shard=shard,
                size_bytes=events.shard_bytes.get(shard),
                updates=int(updates.sum()),
                pulls=int(pulls.sum()),
                busy_ns=took,
                busy_share=took / max(span_ns, 1),
                mean_queue=float(queue.mean()) if len(queue) else None,
                largest_queue=int(queue.max()) if len(queue) else None,
                mean_wait_ms=float(waited.mean()) / 1e6 if len(waited) else None,
            )
        )
    return tuple(loads)


def _list_losses(events: TogetherEvents, first_ns: int) -> tuple[LossPoint, ...]:
    """The mean of equally many updates, in the order in which they were pushed."""
    pushes = events.pushes
    ended = pushes.at_unix_ns + pushes.took_ns
    order = np.argsort(ended, kind="stable")
    number = np.arange(1, len(order) + 1)
    known = np.isfinite(pushes.loss[order])
    rows = [part for part in np.array_split(np.flatnonzero(known), _MOST_POINTS) if len(part)]
    ended, loss = ended[order], pushes.loss[order]
    return tuple(
        LossPoint(
            s=(int(ended[part[-1]]) - first_ns) / 1e9,
            updates=int(number[part[-1]]),
            loss=float(loss[part].mean()),
        )
        for part in rows
    )


# What waiting for others costs, and how much of it a consistency can avoid at best.
#
# Three steps bound every consistency. With a barrier a step takes as long as its slowest worker.
# With bounded staleness workers run ahead of others for a while, but in the long run none is faster
# than the slowest worker is on average. Without any waiting every worker has its own pace.

WORTH = 0.05  # of the step: what is less is no reason to change the consistency
_SLOWER = 1.1  # a worker whose typical step is this much longer is slow at every step


def find_straggling(times: WorkerTimes) -> Straggling:
    """Needs two workers and one step of each."""
    means = np.array([series.mean() for series in times.own_ns])
    medians = np.array([median(series) for series in times.own_ns])
    slowest = int(means.argmax())
    others = median(np.delete(medians, slowest))
    barrier = mean_of_slowest(times)
    free = len(means) / float((1 / np.maximum(means, 1.0)).sum())
    ratio = float(medians[slowest]) / max(others, 1.0)
    return Straggling(
        kind=_kind(barrier, float(means[slowest]), free),
        workers=len(means),
        barrier_ms=barrier / 1e6,
        slowest_ms=float(means[slowest]) / 1e6,
        free_ms=free / 1e6,
        worker=times.workers[slowest],
        typical_ratio=ratio,
        always=ratio >= _SLOWER,
    )


def _kind(barrier: float, slowest: float, free: float) -> StragglingKind:
    if barrier - free < WORTH * barrier:
        return "none"
    return "transient" if barrier - slowest >= slowest - free else "persistent"


def mean_of_slowest(times: WorkerTimes) -> float:
    """The slowest worker's time, on average over steps. Steps that were not measured side by side
    are taken to be independent."""
    if times.side_by_side:
        return float(np.max(times.own_ns, axis=0).mean())
    # Of one draw from each sorted series.
    ordered = [np.sort(series) for series in times.own_ns]
    values = np.unique(np.concatenate(ordered))
    below = np.ones(len(values))
    for series in ordered:
        below *= np.searchsorted(series, values, side="right") / len(series)
    return float((values * np.diff(below, prepend=0.0)).sum())


def describe_straggling(found: Straggling) -> str:
    """Who is slow, and when."""
    barrier, slowest, free = map(milliseconds, (found.barrier_ms, found.slowest_ms, found.free_ms))
    if found.kind == "none":
        return f"workers take equally long ({barrier} a step with a barrier, {free} without)"
    if found.kind == "transient":
        return (
            "slow steps come to different workers "
            f"({barrier} a step with a barrier, {slowest} at the slowest worker's mean pace)"
        )
    if found.always:
        times = f"{factor(found.typical_ratio)} times as long as the others"
        return f"worker {found.worker} is slow at every step: it takes {times}"
    return f"most slow steps are those of worker {found.worker}"


def describe_effect(found: Straggling, consistency: Consistency, *, pays: bool) -> str:
    """What such a straggler means for this consistency."""
    would = "would " if consistency.synchronous else ""
    if found.kind == "none":
        return "there is little waiting to save"
    if found.kind == "persistent" and consistency.largest_gap is None:
        return "nobody waits for that worker, which adds fewer updates"
    if found.kind == "persistent":
        return f"bounded staleness {would or 'only '}{'only delay' if would else 'delays'} the wait"
    if pays or consistency.synchronous:
        return f"workers that {'may ' if would else ''}run ahead {would}wait less"
    return "workers may not run far enough ahead of such steps"


# The workers' own times in a run with a parameter server: steps without being blocked.

_SIDE_BY_SIDE = 0.5  # of a typical worker's steps must be common to all


class WorkerSteps(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's steps, in order: each from its pull to the next pull, the last one to the end
    of its push. blocked + pull + compute + push + other = step."""

    worker: int
    clock: Int64s
    start_ns: Int64s  # on the worker's wall clock
    step_ns: Int64s
    blocked_ns: Int64s
    pull_ns: Int64s
    compute_ns: Int64s
    push_ns: Int64s  # with what it waited for a full queue
    other_ns: Int64s  # between push and pull, and what no event covers

    def __len__(self) -> int:
        return len(self.clock)

    @property
    def own_ns(self) -> Int64s:
        return self.step_ns - self.blocked_ns


def list_steps(events: TogetherEvents) -> list[WorkerSteps]:
    """Workers with at least one finished step. A pull without its push is no step."""
    workers = np.unique(events.pushes.worker).tolist()
    steps = [_steps_of(events, worker) for worker in workers]
    return [one for one in steps if len(one)]


def _steps_of(events: TogetherEvents, worker: int) -> WorkerSteps:
    """Joined by life and clock; of a pull or push that is there twice, the first counts."""
    pulls, pushes = events.pulls, events.pushes
    mine = np.flatnonzero(pulls.worker == worker)
    key, first = np.unique(_key(pulls.life[mine], pulls.clock[mine]), return_index=True)
    pull = mine[first]
    pushed = np.flatnonzero(pushes.worker == worker)
    pushed_key, first = np.unique(
        _key(pushes.life[pushed], pushes.clock[pushed]), return_index=True
    )
    _, left, right = np.intersect1d(key, pushed_key, assume_unique=True, return_indices=True)
    pull, push = pull[left], pushed[first][right]
    order = np.argsort(pulls.at_unix_ns[pull], kind="stable")
    pull, push = pull[order], push[order]
    start = pulls.at_unix_ns[pull]
    done = pushes.at_unix_ns[push] + pushes.took_ns[push]
    blocked, transfer = pulls.blocked_ns[pull], pulls.transfer_ns[pull]
    took = pushes.took_ns[push]
    # A new life begins after a pause that belongs to no step.
    goes_on = pulls.life[pull][1:] == pulls.life[pull][:-1]
    end = np.append(np.where(goes_on, start[1:], done[:-1]), done[-1:])
    compute = pushes.compute_ns[push]
    until_push = pushes.at_unix_ns[push] - start - blocked - transfer
    compute = np.where(compute >= 0, compute, np.maximum(until_push, 0))
    covered = blocked + transfer + compute + took
    step = np.maximum(end - start, covered)
    return WorkerSteps(
        worker=worker,
        clock=pulls.clock[pull],
        start_ns=start,
        step_ns=step,
        blocked_ns=blocked,
        pull_ns=transfer,
        compute_ns=compute,
        push_ns=took,
        other_ns=step - covered,
    )


def _key(life: Int64s, clock: Int64s) -> Int64s:
    """Later lives after earlier ones, clocks in order."""
    return (life << 40) + clock


def worker_times(steps: list[WorkerSteps]) -> WorkerTimes:
    """Side by side by clock where most clocks are common to all workers."""
    usual = median([len(one) for one in steps])
    common: Int64s = reduce(np.intersect1d, (one.clock for one in steps))
    side_by_side = len(common) >= max(1.0, _SIDE_BY_SIDE * usual)
    series = [_at(one, common) if side_by_side else one.own_ns.astype(float) for one in steps]
    return WorkerTimes(
        workers=tuple(one.worker for one in steps),
        own_ns=tuple(series),
        side_by_side=side_by_side,
        source="server",
    )


def _at(steps: WorkerSteps, clocks: Int64s) -> Floats:
    """Own times at these clocks; of a clock that two lives had, the last."""
    reversed_clock = steps.clock[::-1]
    _, last = np.unique(reversed_clock, return_index=True)
    own: Floats = steps.own_ns[::-1][last].astype(np.float64)
    return own[np.searchsorted(np.unique(steps.clock), clocks)]


# Staleness and blocking in sentences.

_NAMED = 0.1  # of all blocked time: who causes less is not named


def describe_staleness(summary: TogetherSummary) -> tuple[str, ...]:
    """How far behind reads were; nothing if no read tells."""
    stale = summary.staleness
    if stale.mean is None or stale.largest is None:
        return ()
    behind = f"{significant(stale.mean)} steps behind on average, {stale.largest} at most"
    return (f"reads are {behind} ({counted(stale.pulls, 'pull')})",)


def name_blockers(summary: TogetherSummary) -> tuple[str, ...]:
    """Whom the others wait for, the costliest first."""
    total = sum(pair.blocked_ns for pair in summary.blocks)
    by: dict[int, int] = {}
    for pair in summary.blocks:
        by[pair.by] = by.get(pair.by, 0) + pair.blocked_ns
    ordered = sorted(by.items(), key=lambda item: -item[1])
    named = [
        f"worker {worker} ({percent(ns / total)})" for worker, ns in ordered if ns > _NAMED * total
    ]
    return (f"waited for: {', '.join(named[:4])}",) if named else ()
