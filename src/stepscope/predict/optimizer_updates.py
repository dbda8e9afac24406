"""Which update rule the step's optimizer follows, and in which form it runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.explain.replay.graph import CallKind, Phase
from stepscope.predict.optimizer_rules import ADAGRAD, ADAM, MOMENTUM, PLAIN
from stepscope.records.trace import HostKind
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags
    from stepscope.predict.optimizer_rules import UpdateRule
    from stepscope.predict.step_context import StepContext

_FUSED = re.compile(r"_fused_(?:adam|adamw|sgd|adagrad)", re.IGNORECASE)
_FOREACH = re.compile(r"_foreach_")
_MOMENTUM = re.compile(r"mul_")  # plain SGD only adds
_NAME = re.compile(r"^Optimizer\.step#(\w+)\.step$")


def find_rule(context: StepContext) -> UpdateRule:
    """By the name that torch writes around the optimizer's step; Adam's if there is none."""
    names = _optimizer_names(context)
    others = sorted(names - {"Adam", "AdamW", "SGD"})
    if others == ["Adagrad"]:
        return ADAGRAD
    if others:
        return replace(ADAM, name=others[0], fused=False, fused_on_cpu=False)
    if names == {"SGD"}:
        return MOMENTUM if any(_MOMENTUM.search(name) for name in _called(context)) else PLAIN
    return ADAM


def current_form(context: StepContext) -> str | None:
    """By the names of what the optimizer's calls run; None without an optimizer step."""
    if not find_optimizer_calls(context).any():
        return None
    names = _called(context)
    if any(_FUSED.search(name) for name in names):
        return "fused"
    foreach = any(_FOREACH.search(name) or "multi_tensor" in name for name in names)
    return "foreach" if foreach else "loop"


def find_optimizer_calls(context: StepContext) -> Flags:
    calls = context.graph.calls
    updating: Flags = (calls.phase == Phase.OPTIMIZER) & (calls.kind != CallKind.WAIT)
    return updating


def _called(context: StepContext) -> set[str]:
    """Names of the optimizer's operators and kernels."""
    host, device, strings = context.trace.host, context.trace.device, context.trace.strings
    updating = find_optimizer_calls(context)
    rows = context.graph.calls.operator[updating]
    names = {strings[host.name[row]] for row in rows[rows >= 0].tolist()}
    kernels = context.graph.tasks.row[updating[context.graph.tasks.call]]
    if len(device):
        names |= {strings[device.name[row]] for row in kernels[kernels >= 0].tolist()}
    return names


def _optimizer_names(context: StepContext) -> set[str]:
    host, strings = context.trace.host, context.trace.strings
    codes = distinct(host.name[host.kind == HostKind.ANNOTATION]).tolist()
    matches = (_NAME.match(strings[code]) for code in codes)
    return {match[1] for match in matches if match}
