"""A run through a parameter server, from its events: who waited, and whether it paid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.together.own_times import list_steps, worker_times
from stepscope.explain.together.straggling import (
    WORTH,
    describe_effect,
    describe_straggling,
    find_straggling,
)
from stepscope.records.figures import factor, percent
from stepscope.records.together_summary import (
    BlockedBy,
    LossPoint,
    ShardLoad,
    Staleness,
    TogetherSummary,
    WorkerShare,
)
from stepscope.records.words import sentence

if TYPE_CHECKING:
    from stepscope.explain.together.own_times import WorkerSteps
    from stepscope.records.consistency import Consistency
    from stepscope.records.together_events import TogetherEvents
    from stepscope.records.together_summary import Straggling, TogetherVerdict

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
    first_ns, last_ns = _span(events)
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


def _span(events: TogetherEvents) -> tuple[int, int]:
    pulls, pushes = events.pulls, events.pushes
    starts = [pulls.at_unix_ns, pushes.at_unix_ns]
    ends = [pulls.at_unix_ns + pulls.blocked_ns + pulls.transfer_ns]
    ends += [pushes.at_unix_ns + pushes.took_ns]
    return (
        min(int(one.min()) for one in starts if len(one)),
        max(int(one.max()) for one in ends if len(one)),
    )


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
