"""optimizer=foreach|fused: the same update with fewer launches and fewer passes over the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.predict.edit import Selection, insert, remove
from stepscope.predict.kernels import FLOOR_NS
from stepscope.predict.optimizer_updates import current_kind, stepping
from stepscope.predict.outcome import Outcome, Refused, WrongValue, changed
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.predict.optimizer_rules import Rule
    from stepscope.predict.step_context import StepContext

HELP = "foreach or fused instead of what runs now"
VALUES = ("foreach", "fused")


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses where the optimizer is as asked already, or none can be seen."""
    if value not in VALUES:
        raise WrongValue(f"optimizer={value}: choose foreach or fused")
    mine, now, rule = stepping(context), current_kind(context), context.rule
    if now is None:
        raise Refused("optimizer: the trace shows no optimizer step")
    old, new = rule.kinds[now], rule.kinds[value]
    if old.order >= new.order:
        raise Refused(f"optimizer={value}: the optimizer is {now} already")
    if value == "fused" and not rule.fused:
        raise Refused(f"optimizer=fused: PyTorch has no fused form of {rule.name}")
    parameters = context.parameters
    if parameters is None:
        raise Refused("optimizer: the trace does not give the parameters (record shapes)")
    graph = context.graph
    updating = mine[graph.tasks.call]
    host = float((graph.calls.gap_ns + graph.calls.call_ns)[mine].sum())
    host_new = host * new.host_us(parameters.tensors) / old.host_us(parameters.tensors)
    ceilings = context.ceilings
    rate = ceilings.bytes_s if ceilings and ceilings.bytes_s else None
    device = float(graph.tasks.dur_ns[updating].sum())
    device_new = (
        parameters.elements * new.bytes_each / rate * 1e9
        if rate
        else device * new.bytes_each / old.bytes_each
    )
    count = max(new.fewest, round(new.launches * parameters.elements / 1e6))
    device_new = max(device_new, count * FLOOR_NS)
    place = np.full(count, int(np.flatnonzero(mine)[0]), np.int32)
    stream = int(graph.tasks.stream[updating][0]) if updating.any() else 0
    graph = insert(
        graph,
        place,
        gap_ns=host_new * 0.9 / count,
        call_ns=host_new * 0.1 / count,
        dur_ns=device_new / count,
        stream=stream,
    )
    # The new calls stand before the first old one and have its phase.
    chosen = np.concatenate((mine[: place[0]], np.zeros(count, np.bool_), mine[place[0] :]))
    graph = remove(graph, Selection(calls=chosen, tasks=chosen[graph.tasks.call]))
    on_device = f", {device / 1e6:.2f} -> {device_new / 1e6:.2f} ms of the device"
    return Outcome(
        context=changed(context, graph),
        assumptions=(
            f"{now} -> {value} for {counted(parameters.tensors, 'tensor')} of "
            f"{parameters.elements:,} "
            f"parameters: {host / 1e6:.2f} -> {host_new / 1e6:.2f} ms of the host"
            f"{'' if context.on_host else on_device}",
            _about(rule),
        ),
        spread=0.2,
    )


def _about(rule: Rule) -> str:
    if rule.fused:
        return f"as {rule.name} of this kind does on an H200"
    return f"as Adam of this kind does; {rule.name} moves other bytes"
