"""Simulate training through a parameter server from measured step times: updates per second,
staleness and blocked time of a consistency. Also another consistency for a run through one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.parameter_server import (
    WORTH,
    WorkerSteps,
    describe_effect,
    describe_straggling,
    find_straggling,
    list_steps,
    worker_times,
)
from stepscope.predict.data_parallel import ENOUGH_STEPS
from stepscope.predict.declaration import Refused
from stepscope.predict.fitted import fitted
from stepscope.records.change_values import Consistency
from stepscope.records.job import WorkerTimes
from stepscope.records.normal import NORMAL_95, median
from stepscope.records.parameter_server import (
    ConsistencyPromise,
    RequestColumns,
    Staleness,
    Straggling,
    TogetherEvents,
)
from stepscope.records.prediction import Prediction, Setting
from stepscope.text.figures import percent, signed_percent, significant
from stepscope.text.words import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Places = NDArray[np.int64]

_RUNS = 16  # drawn from the measured one; their spread is the interval
_LEAST_STEPS, _MOST_STEPS = 400, 10_000  # per worker of a drawn run
_BOUNDS = 20  # a run is at least so many times as long as a worker may run ahead
_MOST_REQUESTS = 20_000  # that the queue's loop takes one after the other
_MOST_NUMBERS = 4_000_000  # held in memory for all runs
_WARM_UP = 0.1  # of a run: workers start together, which favours those that wait
_IDLE_SERVER = 0.01  # busier servers make a queue that is worth simulating
_MODEL_DOUBT = fitted("doubts.server")  # of a throughput: what the simulation leaves out


def promise_throughput(
    times: WorkerTimes,
    consistency: Consistency,
    server: ServerTimes | None = None,
    *,
    seed: int = 0,
) -> ConsistencyPromise:
    """Needs two workers. Without `server`, servers are taken to answer at once."""
    workers = len(times.workers)
    rate = sum(1 / max(float(series.mean()), 1.0) for series in times.own_ns)
    queued = server is not None and server.busy_ns * rate > _IDLE_SERVER
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


def _choose_steps(times: WorkerTimes, consistency: Consistency, *, queued: bool) -> int:
    """As long as the measured run, long enough for the bound to matter, and no longer than can be
    simulated in seconds."""
    measured = max(map(len, times.own_ns))
    least = _LEAST_STEPS // 2 if queued else _LEAST_STEPS
    wanted = max(least, measured, _BOUNDS * ((consistency.largest_gap or 0) + 1))
    most = max(_LEAST_STEPS // 4, _MOST_REQUESTS // (2 * len(times.workers)))
    return min(wanted, _MOST_STEPS, most if queued else _MOST_STEPS)


# When workers start and end their steps, if servers answer at once: one pass over the clocks.
#
# A worker's clock counts the steps it has pushed. Consistency says which clock all workers must
# have reached before one of them may start a step (`needed_clocks`). So the start of a step is the
# later of two times, and all workers of all runs are computed at once, clock after clock.


class SimulatedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """(runs, steps, workers) in nanoseconds; infinite for a step that was not simulated. A step
    starts when its worker may pull, and ends when its update is applied."""

    start_ns: Floats
    end_ns: Floats


def needed_clocks(consistency: Consistency, steps: int) -> NDArray[np.int64]:
    """For each of a worker's steps, the clock that all workers must have reached before it."""
    clock = np.arange(steps + 1, dtype=np.int64)
    gap = consistency.largest_gap
    return np.zeros_like(clock) if gap is None else np.maximum(clock - gap, 0)


def simulate_clocks(own_ns: Floats, consistency: Consistency) -> SimulatedRuns:
    """`own_ns` is (runs, steps, workers)."""
    runs, steps, workers = own_ns.shape
    start, end = np.empty_like(own_ns), np.empty_like(own_ns)
    needed = needed_clocks(consistency, steps)
    all_reached = np.zeros((runs, steps + 1))  # when the last worker reaches each clock
    ready = np.zeros((runs, workers))
    for clock in range(steps):
        start[:, clock] = np.maximum(ready, all_reached[:, needed[clock], None])
        ready = start[:, clock] + own_ns[:, clock]
        end[:, clock] = ready
        all_reached[:, clock + 1] = ready.max(axis=1)
    return SimulatedRuns(start_ns=start, end_ns=end)


# When workers start and end their steps, with servers that serve one request after the other.
#
# Every step is a pull, the worker's own work, and a push. Requests go to all shards at once; a
# shard serves them in the order in which they come. The loop takes one request after the other, of
# all simulated runs at once.


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


# New runs from a measured one: blocks of consecutive steps, so that slow spells stay together.
#
# A worker's step is its typical time (its own median, which stays) plus a residual. Residuals are
# drawn in blocks. If the workers' steps were measured side by side, all workers take the same
# block: what slows several workers at once does so in the new runs too.

_FADED = 0.1  # an autocorrelation below this counts as none
_SPELLS = 4  # a block holds so many spells of correlated steps
_LEAST_BLOCKS = 4  # that a measured series is cut into


def draw_runs(times: WorkerTimes, *, runs: int, steps: int, seed: int = 0) -> Floats:
    """Own times of new runs: (runs, steps, workers), in nanoseconds."""
    rng = np.random.default_rng(seed)
    own = np.empty((runs, steps, len(times.workers)))
    shared: Places | None = None
    for column, series in enumerate(times.own_ns):
        typical = median(series)
        if shared is None or not times.side_by_side:
            block = max(map(block_length, times.own_ns)) if times.side_by_side else None
            size = block or block_length(series)
            # A block that passes the end of the series goes on at its start.
            first = rng.integers(0, len(series), (runs, -(-steps // size)))
            places = (first[:, :, None] + np.arange(size)) % len(series)
            shared = places.reshape(runs, -1)[:, :steps]
        own[:, :, column] = typical + (series - typical)[shared]
    return own


def block_length(series: Floats) -> int:
    """Several times as long as steps stay correlated, and at least the root of their number."""
    count = len(series)
    longest = max(1, count // _LEAST_BLOCKS)
    lag = 0  # the first one at which the autocorrelation has faded; 0 for a constant series
    deviation = series - series.mean()
    if deviation.any():
        power = np.abs(np.fft.rfft(deviation, 2 * count)) ** 2
        correlation = np.fft.irfft(power, 2 * count)[:count]
        faded = np.flatnonzero(correlation < _FADED * correlation[0])
        lag = int(faded[0]) if len(faded) else count
    return min(longest, max(math.isqrt(count), _SPELLS * lag))


# A promised consistency in sentences.

_SOURCES = {
    "every step": "every step of the run",
    "window": "only the steps under the profiler, where slow steps are rare",
    "server": "what the workers recorded",
}


def describe_promise(
    straggling: Straggling, times: WorkerTimes, promise: ConsistencyPromise
) -> tuple[str, ...]:
    """What the workers are like, what would change, and where that comes from."""
    pays = promise.step_ms < (1 - WORTH) * straggling.barrier_ms
    effect = describe_effect(straggling, Consistency.parse(promise.consistency), pays=pays)
    stale = promise.staleness
    reads = f"{significant(stale.mean or 0.0)} steps behind on average, {stale.largest} at most"
    steps = sum(map(len, times.own_ns))
    return (
        f"{describe_straggling(straggling)}, and {effect}",
        f"{promise.consistency}: {significant(promise.updates_per_s)} updates/s. Parameters "
        f"are {reads} when read. Workers are blocked for {percent(promise.blocked_share)} of "
        "their time",
        f"simulated from {_SOURCES[times.source]} ({counted(steps, 'step')} of "
        f"{counted(len(times.workers), 'worker')}). Slow periods stay together",
        "this is throughput only: stale gradients may need more steps to reach the same loss",
    )


# Another consistency for a run through a parameter server, from what its workers recorded.


class ServerRun:
    """A run that other consistencies can be tried on. Raises Refused for too little of it.

    The run is simulated as it was too: what the simulation is off there, promises are moved by.
    """

    def __init__(self, events: TogetherEvents) -> None:
        steps = list_steps(events)
        fewest = min(map(len, steps), default=0)
        if len(steps) < 2:
            raise Refused("consistency: there is one worker, which waits for nobody")
        if fewest < ENOUGH_STEPS:
            raise Refused(
                f"consistency: a worker has {counted(fewest, 'step')}, too few to separate slow "
                "workers from slow steps. Train for longer"
            )
        self.times = worker_times(steps)
        self.server = find_server_times(events)
        self.work = worker_times([_without_requests(one) for one in steps])
        self.simulated = promise_throughput(self.work, events.consistency, self.server)
        self.updates_per_s = sum(len(one) / max(float(one.step_ns.sum()), 1) for one in steps) * 1e9

    @property
    def step_ms(self) -> float:
        """The mean step of a worker, as measured."""
        return 1e3 * len(self.times.workers) / self.updates_per_s

    @property
    def own_ms(self) -> float:
        return float(np.mean([series.mean() for series in self.work.own_ns])) / 1e6

    def predict(self, consistency: Consistency) -> Prediction:
        """The mean step of a worker, now and with this consistency."""
        now, measured = self.simulated.updates_per_s, self.updates_per_s
        promise, by = promise_throughput(self.work, consistency, self.server), measured / now
        promise = msgspec.structs.replace(
            promise,
            updates_per_s=promise.updates_per_s * by,
            low=promise.low * by,
            high=promise.high * by,
            step_ms=promise.step_ms / by,
        )
        off = (
            f"for the present run ({self.simulated.consistency}) the simulation gives "
            f"{significant(now)} updates/s, measured {significant(measured)}. The prediction "
            f"is scaled by {signed_percent(measured / now - 1)}"
        )
        delay = self.server.pull_delay_ns + self.server.push_delay_ns
        described = (
            *describe_promise(find_straggling(self.times), self.times, promise),
            off,
            f"the busiest shard works {significant(self.server.busy_ns / 1e6)} ms for each step of "
            "a worker, one request after the other. Messages take "
            f"{significant(delay / 1e6)} ms more",
        )
        step_ms = self.step_ms
        setting = Setting(name="consistency", value=promise.consistency)
        low, high = (1e3 * promise.workers / rate for rate in (promise.high, promise.low))
        return Prediction(
            settings=(setting,),
            baseline_ms=step_ms,
            baseline_low_ms=step_ms,
            baseline_high_ms=step_ms,
            baseline_from="measured",
            profiled_ms=step_ms,
            predicted_ms=promise.step_ms,
            low_ms=low,
            high_ms=high,
            basis="mean",
            host_ms=self.own_ms,
            device_ms=0.0,
            throughput_factor=step_ms / promise.step_ms,
            speedup_low=step_ms / high,
            speedup_high=step_ms / low,
            assumptions=described,
            applied=(setting,),
            consistency=promise,
        )


def _without_requests(steps: WorkerSteps) -> WorkerSteps:
    own = steps.compute_ns + steps.other_ns
    return msgspec.structs.replace(steps, step_ns=own, blocked_ns=np.zeros_like(own))


def find_server_times(events: TogetherEvents) -> ServerTimes:
    """What each shard is busy for a pull and for one gradient, and what else these take, on
    average."""
    applied, served, pulls = events.applied, events.served, events.pulls
    shards = np.union1d(applied.shard, served.shard).tolist()
    pull_ns = tuple(_mean_ns(served, shard) for shard in shards)
    push_ns = tuple(_mean_ns(applied, shard) for shard in shards)
    asked = pulls.gap >= 0  # a copy at hand has no gap
    return ServerTimes(
        pull_ns=pull_ns,
        push_ns=push_ns,
        pull_delay_ns=_mean_delay(pulls.transfer_ns[asked], served, pull_ns),
        push_delay_ns=_mean_delay(events.pushes.took_ns, applied, push_ns),
    )


def _mean_ns(requests: RequestColumns, shard: int) -> float:
    mine = requests.shard == shard
    count = int(np.maximum(requests.gradients[mine], 1).sum())
    return float(requests.took_ns[mine].sum()) / count if count else 0.0


def _mean_delay(took_ns: Places, requests: RequestColumns, busy_ns: tuple[float, ...]) -> float:
    """What requests take beside the shards' work and their queue."""
    if not len(took_ns):
        return 0.0
    waited = float(requests.waited_ns.mean()) if len(requests) else 0.0
    return max(0.0, float(took_ns.mean()) - waited - max(busy_ns, default=0.0))
