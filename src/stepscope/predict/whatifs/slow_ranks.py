"""Slow ranks: brought to the pace of the others, or no longer waited for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.errors import UsageError
from stepscope.explain.parameter_server import find_straggling
from stepscope.predict.data_parallel import ENOUGH_STEPS, find_traced_exchange, slow_down
from stepscope.predict.declaration import Outcome, Refused, WrongValue, changed
from stepscope.predict.parameter_server import describe_promise, promise_throughput
from stepscope.predict.step_context import StepContext
from stepscope.records.change_values import Consistency
from stepscope.records.job import Job, Straggler, Stragglers, WorkerTimes
from stepscope.records.normal import NORMAL_95, median
from stepscope.step.edit import scale_tasks
from stepscope.step.graph import StepGraph
from stepscope.step.replay import step_ns
from stepscope.step.work import Kind
from stepscope.text.figures import milliseconds
from stepscope.text.words import counted

if TYPE_CHECKING:
    from stepscope.step.graph import Floats


# no-straggler: the slowest rank takes as long as the median rank.

_SMALLEST_GAIN = 0.02  # of the step: less is no straggler
_BISECTIONS = 30


def predict_no_straggler(context: StepContext, _value: str) -> Outcome:
    """Refuses one rank, and a job in which no rank is known to be slower than the others."""
    job = context.job
    if job is None or len(job.ranks) < 2:
        raise Refused(
            "no-straggler: give all ranks of the job, because one alone cannot be compared"
        )
    accused = _accused_by_run(job)
    if accused is not None:
        return _without(context, accused, job.step_ms or max(times.step_ms for times in job.times))
    own_ms = np.array([times.own_ms for times in job.times])
    slowest, gain_ms = _gain(own_ms)
    rank, job_step_ms = job.ranks[slowest], max(times.step_ms for times in job.times)
    if not _is_rank(job.stragglers) or gain_ms < _SMALLEST_GAIN * job_step_ms:
        raise Refused(f"no-straggler: {_why_not(job.stragglers)}")
    wanted_ns = (1.0 - gain_ms / job_step_ms) * step_ns(context.graph)
    return Outcome(
        context=changed(
            context, _shorten(context, (rank,), _to_median(own_ms, slowest), wanted_ns)
        ),
        assumptions=(
            f"rank {rank} needs {milliseconds(own_ms[slowest])} per step without "
            "communication. The others need "
            f"{milliseconds(_median_of_others(own_ms, slowest))} (median). Without that "
            f"difference, recorded steps of {milliseconds(job_step_ms)} are "
            f"{milliseconds(gain_ms)} shorter",
            "the next slowest rank then sets the pace",
        ),
        spread=0.05,
    )


def _accused_by_run(job: Job) -> Straggler | None:
    """The costliest rank that the steps of the whole run show to be late, or slow host."""
    late = [one for one in job.stragglers.ranks if one.cause != "link"]
    return next((one for one in late if one.source == "every step" or one.scope == "host"), None)


def _without(context: StepContext, late: Straggler, step_ms: float) -> Outcome:
    """The gain is what the whole run shows: how much earlier the last rank would arrive."""
    if late.cost_ms < _SMALLEST_GAIN * step_ms:
        gain = f"{milliseconds(late.cost_ms)} of {milliseconds(step_ms)}"
        raise Refused(f"no-straggler: without {_who(late)} a step is only {gain} shorter")
    ranks = late.ranks if late.rank is None else (late.rank,)
    wanted_ns = max(0.0, 1.0 - late.cost_ms / step_ms) * step_ns(context.graph)
    graph = _shorten(context, ranks, 1.0 - late.cost_ms / step_ms, wanted_ns)
    often = "at every step" if late.one_in is None else f"in 1 step of {late.one_in}"
    return Outcome(
        context=changed(context, graph),
        assumptions=(
            f"{_who(late)} is late by {milliseconds(late.excess_ms or late.cost_ms)} {often}. "
            f"Without that, the last rank arrives {milliseconds(late.cost_ms)} earlier on "
            "average",
            "the next slowest rank then sets the pace",
        ),
        spread=0.05,
    )


def _who(late: Straggler) -> str:
    return f"rank {late.rank}" if late.rank is not None else f"{late.host}"


def _to_median(own_ms: Floats, slowest: int) -> float:
    return _median_of_others(own_ms, slowest) / float(own_ms[slowest])


def _is_rank(stragglers: Stragglers) -> bool:
    """A slow link is not a rank that could be made faster."""
    links_only = stragglers.ranks and all(slow.rank is None for slow in stragglers.ranks)
    return stragglers.verdict == "found" and not links_only


def _why_not(stragglers: Stragglers) -> str:
    if stragglers.verdict == "not resolved":
        return f"it is unclear whether a rank is slower than the others: {stragglers.detail}"
    return "no rank is slower than the others"


def _median_of_others(own_ms: Floats, slowest: int) -> float:
    return median(np.delete(own_ms, slowest))


def _gain(own_ms: Floats) -> tuple[int, float]:
    """The slowest rank, and what a step gains when that rank takes as long as the median one."""
    slowest = int(own_ms.argmax())
    after = own_ms.copy()
    after[slowest] = min(own_ms[slowest], _median_of_others(own_ms, slowest))
    return slowest, float(own_ms.max() - after.max())


def _shorten(
    context: StepContext, ranks: tuple[int, ...], factor: float, wanted_ns: float
) -> StepGraph:
    """Shorten the slow ranks' own work; on any other rank, its waiting inside collectives."""
    graph = context.graph
    if context.trace.rank in ranks:
        return slow_down(graph, factor)
    comm = graph.tasks.kind == Kind.COMM
    if not comm.any():
        raise Refused(f"no-straggler: the trace of rank {context.trace.rank} shows no collectives")
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        too_short = step_ns(scale_tasks(graph, comm, middle)) < wanted_ns
        low, high = (middle, high) if too_short else (low, middle)
    return scale_tasks(graph, comm, high)


# consistency=bounded:3: train through a parameter server instead of waiting at every step.

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


def predict_consistency(context: StepContext, value: str) -> Outcome:
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
