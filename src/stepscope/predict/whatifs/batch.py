"""Another batch size, micro-batches, and several models trained as one."""

from __future__ import annotations

import re

import numpy as np
from msgspec.structs import replace

from stepscope.predict.batch_size import grow_batch
from stepscope.predict.declaration import Outcome, Refused, WrongValue, changed, parse_whole
from stepscope.predict.peaks import why_unsure
from stepscope.predict.stalls import repeat_stalls
from stepscope.predict.step_context import StepContext
from stepscope.step.edit import take_calls, take_tasks
from stepscope.step.graph import Phase, StepGraph

# batch=N (or batch=x2): another number of samples per step.

_FACTOR = re.compile(r"^x(\d+(?:\.\d+)?)$")


def predict_batch(context: StepContext, value: str) -> Outcome:
    """Refuses a number of samples if the trace's own batch is not known, and a whole graph."""
    factor = batch_factor(context, value)
    reading = context.batch_reading
    if reading is not None and reading.one_graph:
        raise Refused(
            f"batch={value}: every step reads the same {reading.size:,} rows. This may be one "
            "whole graph, which has no batch"
        )
    outcome = grow_batch(context, factor)
    said = (*outcome.assumptions, *why_unsure(context, context.grown * factor))
    return replace(outcome, assumptions=said)


def batch_factor(context: StepContext, value: str) -> float:
    """New batch over old."""
    match = _FACTOR.match(value)
    if match and float(match[1]) > 0:
        return float(match[1])
    try:
        wanted = int(value)
    except ValueError:
        raise WrongValue(
            f"batch={value}: give a number of samples, or a factor such as x2"
        ) from None
    if wanted < 1:
        raise WrongValue(f"batch={value}: give at least one sample")
    reading = context.batch_reading
    if reading and reading.doubt:
        raise Refused(
            f"batch={value}: the trace shows {reading.size:,} ({reading.read_from}), but that "
            f"may not be the number of samples: {reading.doubt}. Give a factor, such as "
            "batch=x2"
        )
    if not context.batch:
        raise Refused(
            f"batch={value}: the trace does not say its batch size. Give a factor, such as batch=x2"
        )
    if wanted == context.batch and reading:
        raise Refused(f"batch={value}: it is {wanted:,} now ({reading.read_from})")
    return wanted / context.batch


# accumulate=N: N micro-batches of the present size before each optimizer step.

_MAX_CALLS = 1_000_000  # a step with more is not replayed


def predict_accumulate(context: StepContext, value: str) -> Outcome:
    """Refuses a step without an optimizer step to save."""
    wanted = parse_whole(value)
    if wanted < 2:
        raise WrongValue(f"accumulate={value}: give the number of micro-batches, 2 or more")
    graph = context.graph
    stepping = graph.calls.phase == Phase.OPTIMIZER
    if not stepping.any():
        raise Refused("accumulate: the trace shows no optimizer step")
    if wanted * len(graph.calls) > _MAX_CALLS:
        most = max(2, _MAX_CALLS // len(graph.calls))
        raise Refused(
            f"accumulate={value}: {len(graph.calls):,} calls repeated {wanted:,} times are "
            f"too many to replay. {most} micro-batches can be replayed. With more, the time "
            "per sample stays the same"
        )
    now = context.calls.micro_batches if context.calls else 1
    if wanted % now or wanted == now:
        raise Refused(
            f"accumulate={value}: the step already has {now} micro-batches. Give a multiple "
            f"of {now}"
        )
    repeats = wanted // now
    passes = np.flatnonzero(~stepping)
    order = np.concatenate([*[passes] * repeats, np.flatnonzero(stepping)])
    return Outcome(
        context=replace(
            changed(context, _repeat_calls(graph, order)),
            stalls=repeat_stalls(context.stalls, repeats),
        ),
        assumptions=(
            f"{value} forward and backward passes of the present batch, then one optimizer "
            "step. Gradients are added in place (one zero_grad)",
        ),
        spread=0.05,
        doubt=0.03,  # backward adds to gradients instead of writing them
        samples=float(repeats),
        repeats=float(repeats),
    )


def _repeat_calls(graph: StepGraph, order: np.ndarray) -> StepGraph:
    """The calls in this order, each with its tasks; a call may come again."""
    by_call = [np.flatnonzero(graph.tasks.call == call) for call in range(len(graph.calls))]
    launched = [by_call[call] for call in order.tolist()]
    chosen = np.concatenate(launched) if launched else np.zeros(0, np.intp)
    call = np.repeat(np.arange(len(order), dtype=np.int32), [len(tasks) for tasks in launched])
    tasks = replace(
        take_tasks(graph.tasks, chosen), call=call, after=np.full(len(chosen), -1, np.int32)
    )
    return replace(graph, calls=take_calls(graph.calls, order), tasks=tasks)
