"""The own times of a job's ranks, or why they are not known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.predict.outcome import Refused
from stepscope.predict.slowest_worker import ENOUGH_STEPS
from stepscope.predict.traced_exchange import find_traced_exchange
from stepscope.records.words import counted
from stepscope.records.worker_times import WorkerTimes

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext
    from stepscope.records.job import Job


def find_own_times(context: StepContext) -> WorkerTimes:
    """Of every step if that is known, else of the profiler's window. Raises Refused."""
    job = context.job
    if job is None or len(job.ranks) < 2:
        raise Refused("consistency: give all ranks of the job, because one alone waits for nobody")
    exchange = find_traced_exchange(context, context.graph)
    if exchange is None or exchange.ranks < 2:
        raise Refused("consistency: the ranks exchange no gradients, so none waits for another")
    if exchange.not_replicas:
        raise Refused(f"consistency: the ranks are not replicas: {exchange.not_replicas}")
    times = job.own_times or _window_times(job)
    steps = min(map(len, times.own_ns))
    if steps < ENOUGH_STEPS:
        raise Refused(
            f"consistency: only {counted(steps, 'step')} of all ranks are known, too few to "
            "separate slow workers from slow steps. Record more with `stepscope run`"
        )
    return times


def _window_times(job: Job) -> WorkerTimes:
    known = (job.own_ns > 0).all(axis=1)
    own = job.own_ns[known].astype(np.float64)
    return WorkerTimes(
        workers=job.ranks,
        own_ns=tuple(np.ascontiguousarray(own.T)),
        side_by_side=True,
        source="window",
    )
