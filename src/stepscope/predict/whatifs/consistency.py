"""consistency=bounded:3: train through a parameter server instead of waiting at every step."""

from __future__ import annotations

import math

import numpy as np
from msgspec.structs import replace

from stepscope.errors import UsageError
from stepscope.explain.parameter_server import find_straggling
from stepscope.predict.data_parallel import ENOUGH_STEPS, find_traced_exchange, slow_down
from stepscope.predict.declaration import Outcome, Refused, WrongValue, changed
from stepscope.predict.parameter_server import describe_promise, promise_throughput
from stepscope.predict.step_context import StepContext
from stepscope.records.change_values import Consistency
from stepscope.records.job import Job, WorkerTimes
from stepscope.records.normal import NORMAL_95
from stepscope.step.edit import scale_tasks
from stepscope.step.graph import StepGraph
from stepscope.step.work import Kind
from stepscope.text.words import counted

# The own times of a job's ranks, or why they are not known.


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


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses one rank, ranks that are no replicas of each other, and too few steps."""
    try:
        consistency = Consistency.parse(value)
    except UsageError as error:
        raise WrongValue(str(error)) from None
    times = find_own_times(context)
    now = promise_throughput(times, Consistency.parse("strong"))
    then = promise_throughput(times, consistency)
    ratio = then.step_ms / now.step_ms
    stalls = context.stalls
    longer = replace(
        changed(context, _stretch(context.graph, ratio)),
        stalls=stalls.scaled(tuple(stalls.cost_ns), ratio) if stalls else None,
        consistency=then,
    )
    return Outcome(
        context=longer,
        assumptions=(
            *describe_promise(find_straggling(times), times, then),
            "servers are assumed to answer as fast as the all-reduce does now. With a shard "
            "on every worker's host they move as many bytes over each link",
        ),
        spread=0.0,
        doubt=math.log(then.high / then.low) / (2 * NORMAL_95),
    )


def _stretch(graph: StepGraph, ratio: float) -> StepGraph:
    """The whole step takes `ratio` times as long."""
    return scale_tasks(slow_down(graph, ratio), graph.tasks.kind == Kind.COMM, ratio)
