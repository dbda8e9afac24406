"""When workers start and end their steps, with servers that serve one request after the other.

Every step is a pull, the worker's own work, and a push. Requests go to all shards at once; a shard
serves them in the order in which they come. The loop takes one request after the other, of all
simulated runs at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.predict.consistency.clocks import SimulatedRuns, needed_clocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.consistency import Consistency

    Floats = NDArray[np.float64]


class ServerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long each shard is busy with one request, and what a request takes beside that: messages,
    copies. In nanoseconds."""

    pull_ns: tuple[float, ...]
    push_ns: tuple[float, ...]
    pull_delay_ns: float = 0.0
    push_delay_ns: float = 0.0

    @property
    def busy_ns(self) -> float:
        """What one step of one worker takes of the busiest shard."""
        return max(map(sum, zip(self.pull_ns, self.push_ns, strict=True)), default=0.0)

    def delays_ns(self, consistency: Consistency, steps: int, *, queued: bool) -> Floats:
        """What requests add to each of a worker's steps; without a queue, with the shards' work."""
        pull, push = self.pull_delay_ns, self.push_delay_ns
        if not queued:
            pull += max(self.pull_ns, default=0.0)
            push += max(self.push_ns, default=0.0)
        delays: Floats = push + pull * pulled_clocks(consistency, steps).astype(np.float64)
        return delays


def pulled_clocks(consistency: Consistency, steps: int) -> NDArray[np.bool_]:
    """The steps at which a worker asks for parameters; at others it has a copy."""
    asks: NDArray[np.bool_] = np.arange(steps) % consistency.copy_clocks == 0
    return asks


def simulate_queued(own_ns: Floats, consistency: Consistency, server: ServerTimes) -> SimulatedRuns:
    """`own_ns` is (runs, steps, workers). Every run ends when its first worker has done all steps:
    what the others had left is infinite."""
    runs, steps, workers = own_ns.shape
    service = np.array([server.pull_ns, server.push_ns])
    needed = needed_clocks(consistency, steps)
    pulled = pulled_clocks(consistency, steps)
    start, end = np.full(own_ns.shape, np.inf), np.full(own_ns.shape, np.inf)
    start[:, 0] = 0.0
    row = np.arange(runs)
    comes = np.zeros((runs, workers))  # each worker's next request; infinite while it is blocked
    pushes = np.zeros((runs, workers), np.int64)  # whether that request is a push
    ready = np.full((runs, workers), np.inf)  # when a blocked worker's push was applied
    clock = np.zeros((runs, workers), np.int64)
    free = np.zeros((runs, service.shape[1]))
    over = np.zeros(runs, np.bool_)
    while not over.all():
        worker = comes.argmin(axis=1)
        at, push = comes[row, worker], pushes[row, worker]
        now = np.minimum(clock[row, worker], steps - 1)  # a run that is over changes nothing
        asks = (push == 1) | pulled[now]
        busy = np.where(asks[:, None], np.maximum(free, at[:, None]) + service[push], free)
        free, served = busy, np.where(asks, busy.max(axis=1), at)
        # A pull is followed by the worker's own work, a push by a wait until it may go on.
        work = own_ns[row, now, worker]
        comes[row, worker] = np.where(push == 1, np.inf, served + work)
        pushes[row, worker] = 1 - push
        pushed = np.flatnonzero((push == 1) & ~over)
        if not len(pushed):
            continue
        who, when = worker[pushed], served[pushed]
        end[pushed, now[pushed], who] = when
        clock[pushed, who] = now[pushed] + 1
        ready[pushed, who] = when
        over[pushed] = now[pushed] + 1 == steps
        slowest = clock[pushed].min(axis=1)
        goes_on = np.isfinite(ready[pushed]) & (needed[clock[pushed]] <= slowest[:, None])
        goes_on &= ~over[pushed, None]
        place, free_worker = np.nonzero(goes_on)
        run = pushed[place]
        starts = np.maximum(ready[run, free_worker], when[place])
        start[run, clock[run, free_worker], free_worker] = starts
        comes[run, free_worker] = starts
        ready[run, free_worker] = np.inf
    return SimulatedRuns(start_ns=start, end_ns=end)
