"""The workers' own times in a run with a parameter server: steps without being blocked."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.records.worker_times import WorkerTimes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.together_events import TogetherEvents

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

_SIDE_BY_SIDE = 0.5  # of a typical worker's steps must be common to all


class WorkerSteps(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's steps, in order: each from its pull to the next pull, the last one to the end
    of its push. blocked + pull + compute + push + other = step."""

    worker: int
    clock: Ints
    start_ns: Ints  # on the worker's wall clock
    step_ns: Ints
    blocked_ns: Ints
    pull_ns: Ints
    compute_ns: Ints
    push_ns: Ints  # with what it waited for a full queue
    other_ns: Ints  # between push and pull, and what no event covers

    def __len__(self) -> int:
        return len(self.clock)

    @property
    def own_ns(self) -> Ints:
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


def _key(life: Ints, clock: Ints) -> Ints:
    """Later lives after earlier ones, clocks in order."""
    return (life << 40) + clock


def worker_times(steps: list[WorkerSteps]) -> WorkerTimes:
    """Side by side by clock where most clocks are common to all workers."""
    usual = float(np.median([len(one) for one in steps]))
    common: Ints = reduce(np.intersect1d, (one.clock for one in steps))
    side_by_side = len(common) >= max(1.0, _SIDE_BY_SIDE * usual)
    series = [_at(one, common) if side_by_side else one.own_ns.astype(float) for one in steps]
    return WorkerTimes(
        workers=tuple(one.worker for one in steps),
        own_ns=tuple(series),
        side_by_side=side_by_side,
        source="server",
    )


def _at(steps: WorkerSteps, clocks: Ints) -> Floats:
    """Own times at these clocks; of a clock that two lives had, the last."""
    reversed_clock = steps.clock[::-1]
    _, last = np.unique(reversed_clock, return_index=True)
    own: Floats = steps.own_ns[::-1][last].astype(np.float64)
    return own[np.searchsorted(np.unique(steps.clock), clocks)]
