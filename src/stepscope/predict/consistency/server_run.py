"""Another consistency for a run through a parameter server, from what its workers recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.together.own_times import list_steps, worker_times
from stepscope.explain.together.straggling import find_straggling
from stepscope.predict.consistency.promise import promise_throughput
from stepscope.predict.consistency.queued import ServerTimes
from stepscope.predict.consistency.words import describe_promise
from stepscope.predict.outcome import Refused
from stepscope.predict.slowest_worker import ENOUGH_STEPS
from stepscope.records.figures import percent, significant
from stepscope.records.prediction import Prediction, Setting
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.explain.together.own_times import WorkerSteps
    from stepscope.records.consistency import Consistency
    from stepscope.records.together_events import RequestColumns, TogetherEvents
    from stepscope.records.together_summary import ConsistencyPromise


def predict_server_run(events: TogetherEvents, consistency: Consistency) -> Prediction:
    """The mean step of a worker, now and with this consistency. Raises Refused.

    The run is simulated as it was too: what the simulation is off there, the promise is moved by.
    """
    steps = list_steps(events)
    fewest = min(map(len, steps), default=0)
    if len(steps) < 2:
        raise Refused("consistency: one worker waits for nobody")
    if fewest < ENOUGH_STEPS:
        raise Refused(
            f"consistency: a worker has {counted(fewest, 'step')}, too few to tell slow workers "
            "from slow steps: train for longer"
        )
    times = worker_times(steps)
    server = find_server_times(events)
    delay = _request_delay(events, steps, server)
    alone = [one.compute_ns + one.other_ns + delay for one in steps]
    work = worker_times(
        [
            msgspec.structs.replace(one, step_ns=own, blocked_ns=np.zeros_like(own))
            for one, own in zip(steps, alone, strict=True)
        ]
    )
    now = promise_throughput(work, events.consistency, server)
    then = promise_throughput(work, consistency, server)
    measured = sum(len(one) / max(float(one.step_ns.sum()), 1.0) for one in steps) * 1e9
    promise = _moved(then, measured / now.updates_per_s)
    straggling = find_straggling(times)
    return _prediction(
        promise,
        1e3 * len(steps) / measured,
        own_ms=float(np.mean([own.mean() for own in alone])) / 1e6,
        assumptions=(
            *describe_promise(straggling, times, promise),
            f"as it ran ({now.consistency}) the simulation gives "
            f"{significant(now.updates_per_s)} updates/s, measured {significant(measured)}: the "
            f"promise is moved by {percent(measured / now.updates_per_s - 1)}",
            _describe_server(server, delay),
        ),
    )


def find_server_times(events: TogetherEvents) -> ServerTimes:
    """What each shard is busy for a pull and for one gradient, on average."""
    shards = np.union1d(events.applied.shard, events.served.shard).tolist()
    return ServerTimes(
        pull_ns=tuple(_mean_ns(events.served, shard) for shard in shards),
        push_ns=tuple(_mean_ns(events.applied, shard) for shard in shards),
    )


def _mean_ns(requests: RequestColumns, shard: int) -> float:
    mine = requests.shard == shard
    count = int(np.maximum(requests.gradients[mine], 1).sum())
    return float(requests.took_ns[mine].sum()) / count if count else 0.0


def _request_delay(events: TogetherEvents, steps: list[WorkerSteps], server: ServerTimes) -> int:
    """What a step's requests take beside the shards' work and their queues: messages, copies."""
    whole = float(np.mean([float(one.pull_ns.mean() + one.push_ns.mean()) for one in steps]))
    waits = [
        float(requests.waited_ns.mean())
        for requests in (events.served, events.applied)
        if len(requests)
    ]
    return max(0, round(whole - sum(waits) - server.step_ns))


def _moved(promise: ConsistencyPromise, by: float) -> ConsistencyPromise:
    return msgspec.structs.replace(
        promise,
        updates_per_s=promise.updates_per_s * by,
        low=promise.low * by,
        high=promise.high * by,
        step_ms=promise.step_ms / by,
    )


def _prediction(
    promise: ConsistencyPromise, step_ms: float, *, own_ms: float, assumptions: tuple[str, ...]
) -> Prediction:
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
        host_ms=own_ms,
        device_ms=0.0,
        throughput_factor=step_ms / promise.step_ms,
        speedup_low=step_ms / high,
        speedup_high=step_ms / low,
        assumptions=assumptions,
        applied=(setting,),
        consistency=promise,
    )


def _describe_server(server: ServerTimes, delay_ns: int) -> str:
    busy = significant(server.busy_ns / 1e6)
    return (
        f"the busiest shard works {busy} ms for each step of a worker, one request after the "
        f"other; messages take {significant(delay_ns / 1e6)} ms more"
    )
