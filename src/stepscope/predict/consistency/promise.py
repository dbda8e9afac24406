"""What a consistency would give: measured own times in, updates per second and staleness out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from stepscope.predict.consistency.clocks import simulate_clocks
from stepscope.predict.consistency.queued import simulate_queued
from stepscope.predict.consistency.resample import draw_runs
from stepscope.records.together_summary import ConsistencyPromise, Staleness

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.predict.consistency.clocks import SimulatedRuns
    from stepscope.predict.consistency.queued import ServerTimes
    from stepscope.records.consistency import Consistency
    from stepscope.records.worker_times import WorkerTimes

    Floats = NDArray[np.float64]

_RUNS = 16  # drawn from the measured one; their spread is the interval
_LEAST_STEPS, _MOST_STEPS = 400, 10_000  # per worker of a drawn run
_BOUNDS = 20  # a run is at least so many times as long as a worker may run ahead
_MOST_REQUESTS = 20_000  # that the queue's loop takes one after the other
_MOST_NUMBERS = 4_000_000  # held in memory for all runs
_WARM_UP = 0.1  # of a run: workers start together, which favours those that wait
_IDLE_SERVER = 0.01  # busier servers make a queue that is worth simulating
_MODEL_DOUBT = 0.05  # of a throughput, one standard deviation: what the simulation leaves out
NORMAL_95 = 1.96


def promise_throughput(
    times: WorkerTimes,
    consistency: Consistency,
    server: ServerTimes | None = None,
    *,
    seed: int = 0,
) -> ConsistencyPromise:
    """Needs two workers. Without `server`, servers are taken to answer at once."""
    workers = len(times.workers)
    queued = server is not None and _is_busy(times, server)
    steps = _choose_steps(times, consistency, queued=queued)
    runs = max(4, min(_RUNS, _MOST_NUMBERS // (steps * workers)))
    own = draw_runs(times, runs=runs, steps=steps, seed=seed)
    if server is not None:
        own += server.delays_ns(consistency, steps, queued=queued)[:, None]
    if queued and server is not None:
        simulated = simulate_queued(own, consistency, server)
    else:
        simulated = simulate_clocks(own, consistency)
    rates = updates_per_second(simulated)
    middle = float(np.exp(np.log(rates).mean()))
    half = NORMAL_95 * math.hypot(float(np.log(rates).std(ddof=1)), _MODEL_DOUBT)
    return ConsistencyPromise(
        consistency=str(consistency),
        workers=workers,
        updates_per_s=middle,
        low=middle * math.exp(-half),
        high=middle * math.exp(half),
        step_ms=1e3 * workers / middle,
        blocked_share=blocked_share(simulated),
        staleness=find_staleness(simulated, consistency),
        steps=steps,
        queued=queued,
    )


def updates_per_second(simulated: SimulatedRuns) -> Floats:
    """Of each run: from a step of its fastest worker to that worker's last one."""
    end = simulated.end_ns
    runs, steps, _ = end.shape
    row = np.arange(runs)
    fastest = end[:, -1].argmin(axis=1)
    first, last = end[row, int(_WARM_UP * steps), fastest], end[row, -1, fastest]
    done = (end > first[:, None, None]) & (end <= last[:, None, None])
    rate: Floats = done.sum(axis=(1, 2)) / (last - first) * 1e9
    return rate


def blocked_share(simulated: SimulatedRuns) -> float:
    """Of the workers' time: between a finished push and the pull that may follow it."""
    start, end = simulated.start_ns[:, 1:], simulated.end_ns
    known = np.isfinite(start) & np.isfinite(end[:, 1:])
    before = end[:, :-1][known]
    blocked, whole = (start[known] - before).sum(), (end[:, 1:][known] - before).sum()
    return float(blocked / whole) if whole else 0.0


def find_staleness(simulated: SimulatedRuns, consistency: Consistency) -> Staleness:
    """The read gap of every step: its clock less the clock that all workers had reached when the
    parameters were read. A worker that goes on with old parameters keeps their age."""
    start, end = simulated.start_ns, simulated.end_ns
    runs, steps, _ = start.shape
    clock = np.arange(steps)[:, None]
    every = consistency.copy_clocks
    read = clock[:, 0] // every * every  # the clock at which the parameters were read
    gaps = []
    for run in range(runs):
        all_reached = np.sort(end[run].max(axis=1))
        reached = np.searchsorted(all_reached, start[run][read], side="right")
        # Steps of a run that ended before others had done theirs are not simulated.
        known = np.isfinite(start[run])
        gaps.append(np.maximum(clock - reached, 0)[known])
    return Staleness.of(np.concatenate(gaps))


def _is_busy(times: WorkerTimes, server: ServerTimes) -> bool:
    rate = sum(1 / max(float(series.mean()), 1.0) for series in times.own_ns)
    return server.busy_ns * rate > _IDLE_SERVER


def _choose_steps(times: WorkerTimes, consistency: Consistency, *, queued: bool) -> int:
    """As long as the measured run, long enough for the bound to matter, and no longer than can be
    simulated in seconds."""
    measured = max(map(len, times.own_ns))
    least = _LEAST_STEPS // 2 if queued else _LEAST_STEPS
    wanted = max(least, measured, _BOUNDS * ((consistency.largest_gap or 0) + 1))
    most = max(_LEAST_STEPS // 4, _MOST_REQUESTS // (2 * len(times.workers)))
    return min(wanted, _MOST_STEPS, most if queued else _MOST_STEPS)
