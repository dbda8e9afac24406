"""A promised consistency in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.together.straggling import WORTH, describe_effect, describe_straggling
from stepscope.records.consistency import Consistency
from stepscope.records.figures import percent, significant
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.records.together_summary import ConsistencyPromise, Straggling
    from stepscope.records.worker_times import WorkerTimes

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
