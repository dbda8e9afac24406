"""Another consistency for a run through a parameter server, from what its workers recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.parameter_server import (
    WorkerSteps,
    find_straggling,
    list_steps,
    worker_times,
)
from stepscope.predict.data_parallel import ENOUGH_STEPS
from stepscope.predict.declaration import Refused
from stepscope.predict.parameter_server import ServerTimes, describe_promise, promise_throughput
from stepscope.records.change_values import Consistency
from stepscope.records.parameter_server import ConsistencyPromise, RequestColumns, TogetherEvents
from stepscope.records.prediction import Prediction, Setting
from stepscope.text.figures import signed_percent, significant
from stepscope.text.words import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


class ServerRun:
    """A run that other consistencies can be tried on. Raises Refused for too little of it.

    The run is simulated as it was too: what the simulation is off there, promises are moved by.
    """

    def __init__(self, events: TogetherEvents) -> None:
        steps = list_steps(events)
        _refuse_short(steps)
        self.times = worker_times(steps)
        self.server = find_server_times(events)
        self.work = worker_times([_alone(one) for one in steps])
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
        promise = promise_throughput(self.work, consistency, self.server)
        promise = _moved(promise, measured / now)
        off = (
            f"for the present run ({self.simulated.consistency}) the simulation gives "
            f"{significant(now)} updates/s, measured {significant(measured)}. The prediction "
            f"is scaled by {signed_percent(measured / now - 1)}"
        )
        described = describe_promise(find_straggling(self.times), self.times, promise)
        server = _describe_server(self.server)
        return _prediction(promise, self, assumptions=(*described, off, server))


def _refuse_short(steps: list[WorkerSteps]) -> None:
    fewest = min(map(len, steps), default=0)
    if len(steps) < 2:
        raise Refused("consistency: there is one worker, which waits for nobody")
    if fewest < ENOUGH_STEPS:
        raise Refused(
            f"consistency: a worker has {counted(fewest, 'step')}, too few to separate slow "
            "workers from slow steps. Train for longer"
        )


def _alone(steps: WorkerSteps) -> WorkerSteps:
    """The same steps without any request."""
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


def _mean_delay(took_ns: Ints, requests: RequestColumns, busy_ns: tuple[float, ...]) -> float:
    """What requests take beside the shards' work and their queue."""
    if not len(took_ns):
        return 0.0
    waited = float(requests.waited_ns.mean()) if len(requests) else 0.0
    return max(0.0, float(took_ns.mean()) - waited - max(busy_ns, default=0.0))


def _moved(promise: ConsistencyPromise, by: float) -> ConsistencyPromise:
    return msgspec.structs.replace(
        promise,
        updates_per_s=promise.updates_per_s * by,
        low=promise.low * by,
        high=promise.high * by,
        step_ms=promise.step_ms / by,
    )


def _prediction(
    promise: ConsistencyPromise, run: ServerRun, *, assumptions: tuple[str, ...]
) -> Prediction:
    step_ms = run.step_ms
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
        host_ms=run.own_ms,
        device_ms=0.0,
        throughput_factor=step_ms / promise.step_ms,
        speedup_low=step_ms / high,
        speedup_high=step_ms / low,
        assumptions=assumptions,
        applied=(setting,),
        consistency=promise,
    )


def _describe_server(server: ServerTimes) -> str:
    busy = significant(server.busy_ns / 1e6)
    delay = server.pull_delay_ns + server.push_delay_ns
    return (
        f"the busiest shard works {busy} ms for each step of a worker, one request after the "
        f"other. Messages take {significant(delay / 1e6)} ms more"
    )
