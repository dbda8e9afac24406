"""optimizer=foreach|fused: the same update with fewer launches and fewer passes over the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.predict.declaration import (
    NothingToChange,
    Outcome,
    Refused,
    WrongValue,
    changed,
    require_operators,
)
from stepscope.predict.kernel_costs import FLOOR_NS
from stepscope.predict.peaks import peak_of
from stepscope.predict.step_context import (
    Parameters,
    StepContext,
    UpdateForm,
    current_form,
    find_optimizer_calls,
)
from stepscope.step.edit import Selection, insert, remove
from stepscope.text.figures import significant
from stepscope.text.words import counted

if TYPE_CHECKING:
    from stepscope.step.graph import Flags, StepGraph

_FORMS = ("foreach", "fused")
# Of what the change saves, one standard deviation.
_SPREAD, _CPU_SPREAD = 0.2, 0.4


def predict(context: StepContext, value: str) -> Outcome:
    """Refuses an optimizer that has this form already, and a trace without one."""
    if value not in _FORMS:
        raise WrongValue(f"optimizer={value}: choose foreach or fused")
    now, rule, parameters = current_form(context), context.rule, context.parameters
    if now is None:
        require_operators(context, "optimizer")
        raise Refused("optimizer: the trace shows no optimizer step")
    forms = rule.cpu_forms if context.on_host else rule.forms
    old, new = forms[now], forms[value]
    if old.order >= new.order:
        raise NothingToChange(f"optimizer={value}: the optimizer is {now} already")
    if value == "fused" and not (rule.fused_on_cpu if context.on_host else rule.fused):
        there = " for a GPU" if rule.fused_on_cpu else ""
        raise NothingToChange(f"optimizer=fused: PyTorch has no fused form of {rule.name}{there}")
    if parameters is None:
        raise Refused("optimizer: the trace does not give the parameters (record shapes)")
    graph, updating = context.graph, find_optimizer_calls(context)
    host_ns = float((graph.calls.gap_ns + graph.calls.call_ns)[updating].sum())
    size = parameters.tensors, parameters.elements
    host_after_ns = host_ns * new.host_us(*size) / old.host_us(*size)
    device_ns = float(graph.tasks.dur_ns[updating[graph.tasks.call]].sum())
    launches = max(new.fewest, round(new.launches * parameters.elements / 1e6))
    device_after_ns = 0.0
    if not context.on_host:
        device_after_ns = _device_ns(context, parameters, device_ns, old, new)
        device_after_ns = max(device_after_ns, launches * FLOOR_NS)
    on_device = f", {_change(device_ns, device_after_ns)} of GPU time"
    updated = _replace_update(graph, updating, launches, host_after_ns, device_after_ns)
    after = replace(
        changed(context, updated),
        memory_change=replace(context.memory_change, other_update=True),
        update_form=value,
    )
    return Outcome(
        context=after,
        assumptions=(
            f"{now} -> {value} for {counted(parameters.tensors, 'tensor')} of "
            f"{parameters.elements:,} parameters: {_change(host_ns, host_after_ns)} of CPU "
            f"time{'' if context.on_host else on_device}",
            _basis(context, value),
        ),
        spread=_CPU_SPREAD if context.on_host else _SPREAD,
        peak=peak_of(after),
    )


def _device_ns(
    context: StepContext, parameters: Parameters, now_ns: float, old: UpdateForm, new: UpdateForm
) -> float:
    """By the device's bandwidth if that is known, else by the bytes of both forms."""
    ceilings = context.ceilings
    if ceilings and ceilings.bytes_s:
        return parameters.elements * new.bytes_each / ceilings.bytes_s * 1e9
    return now_ns * new.bytes_each / old.bytes_each


def _replace_update(
    graph: StepGraph, updating: Flags, launches: int, host_ns: float, device_ns: float
) -> StepGraph:
    tasks = updating[graph.tasks.call]
    first = int(np.flatnonzero(updating)[0])
    graph = insert(
        graph,
        np.full(launches, first, np.int32),
        gap_ns=host_ns * 0.9 / launches,
        call_ns=host_ns * 0.1 / launches,
        dur_ns=device_ns / launches,
        stream=int(graph.tasks.stream[tasks][0]) if tasks.any() else 0,
    )
    # The new calls stand before the first old one and have its phase.
    old = np.concatenate((updating[:first], np.zeros(launches, np.bool_), updating[first:]))
    return remove(graph, Selection(calls=old, tasks=old[graph.tasks.call]))


def _change(before_ns: float, after_ns: float) -> str:
    return f"{significant(before_ns / 1e6)} -> {significant(after_ns / 1e6)} ms"


def _basis(context: StepContext, value: str) -> str:
    rule = context.rule
    if not rule.fused and not (context.on_host and rule.fused_on_cpu):
        return f"the gain is Adam's in this form, but {rule.name} moves other bytes"
    if context.on_host:
        return (
            f"the gain is that of {rule.name} with {value} on one core of an ARM server. "
            "Other CPUs differ"
        )
    return f"the gain is that of {rule.name} in this form on an H200"
