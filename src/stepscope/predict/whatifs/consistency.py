"""consistency=bounded:3: train through a parameter server instead of waiting at every step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.errors import UsageError
from stepscope.explain.together.straggling import find_straggling
from stepscope.explain.work import Kind
from stepscope.predict.consistency.measured_times import find_own_times
from stepscope.predict.consistency.promise import NORMAL_95, promise_throughput
from stepscope.predict.consistency.words import describe_promise
from stepscope.predict.declaration import ApplyStage, WhatIf
from stepscope.predict.edit import scale_tasks
from stepscope.predict.outcome import Outcome, WrongValue, changed
from stepscope.predict.slowest_worker import slow_down
from stepscope.records.consistency import Consistency

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import StepGraph
    from stepscope.predict.step_context import StepContext


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


def _label(value: str) -> str:
    return f"a parameter server with {value} consistency"


WHATIF = WhatIf(
    name="consistency",
    help="train through a parameter server (strong, bounded:3, eventual or weak:4)",
    label=_label,
    stage=ApplyStage.BALANCE,
    apply=apply,
    for_several_ranks=True,
    keeps_peak=True,
    needs_ceilings=False,
    remedies={"bounded-staleness": ("bounded:3",), "no-barrier": ("eventual",)},
)
