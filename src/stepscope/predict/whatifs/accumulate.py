"""accumulate=N: N micro-batches of the present size before each optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.graph import Calls, Phase, Tasks
from stepscope.predict.outcome import Outcome, Refused, WrongValue, changed

if TYPE_CHECKING:
    from stepscope.predict.step_context import StepContext

HELP = "N micro-batches per optimizer step (accumulate=4)"
_MOST_CALLS = 1_000_000  # a step with more is not replayed


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses where there is no optimizer step to save."""
    try:
        times = int(value)
    except ValueError:
        times = 0
    if times < 2:
        raise WrongValue(f"accumulate={value}: give the number of micro-batches, 2 or more")
    graph = context.graph
    stepping = graph.calls.phase == Phase.OPTIMIZER
    if not stepping.any():
        raise Refused("accumulate: the trace shows no optimizer step")
    if times * len(graph.calls) > _MOST_CALLS:
        most = max(2, _MOST_CALLS // len(graph.calls))
        raise Refused(
            f"accumulate={value}: {len(graph.calls)} calls {times} times are too many to replay; "
            f"{most} micro-batches can be, and with more the time per sample stays the same"
        )
    now = context.calls.micro_batches if context.calls else 1
    if times % now or times == now:
        raise Refused(
            f"accumulate={value}: the step has {now} micro-batches already: "
            f"give a multiple of {now}"
        )
    times //= now
    passes = np.flatnonzero(~stepping)
    order = np.concatenate([*[passes] * times, np.flatnonzero(stepping)])
    calls = Calls(
        **{
            name: getattr(graph.calls, name)[order]
            for name in graph.calls.__struct_fields__
            if name != "awaits"
        },
        awaits=tuple(graph.calls.awaits[i] for i in order.tolist()),
    )
    by_call = [np.flatnonzero(graph.tasks.call == call) for call in range(len(graph.calls))]
    pieces = [by_call[call] for call in order.tolist()]
    chosen = np.concatenate(pieces) if pieces else np.zeros(0, np.intp)
    number = np.repeat(np.arange(len(order), dtype=np.int32), [len(piece) for piece in pieces])
    tasks = Tasks(
        **{name: getattr(graph.tasks, name)[chosen] for name in graph.tasks.__struct_fields__}
    )
    tasks = replace(tasks, call=number, after=np.full(len(chosen), -1, np.int32))
    return Outcome(
        context=changed(context, replace(graph, calls=calls, tasks=tasks)),
        assumptions=(
            f"{value} forward and backward passes of the present batch, then one optimizer step; "
            "gradients are added up in place (zero_grad once)",
        ),
        spread=0.05,
        doubt=0.03,  # gradients that are added to, not written
        samples=float(times),
        repeats=float(times),
    )
