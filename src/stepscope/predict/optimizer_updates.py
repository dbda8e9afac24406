"""What an optimizer's update costs: by its rule (Adam's, SGD's) and by how it is run.

Measured on an H200: Adam with GPT-2 small, the models of benchmarks/workloads and a stack of linear
layers (docs/accuracy.md), SGD with three of those models and 200 million parameters in 40 tensors.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from stepscope.explain.replay.graph import CallKind, Phase
from stepscope.records.trace import HostKind
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags
    from stepscope.predict.step_context import StepContext

_FUSED = re.compile(r"_fused_(?:adam|adamw|sgd|adagrad)", re.IGNORECASE)
_FOREACH = re.compile(r"_foreach_")
_MOMENTUM = re.compile(r"mul_")  # plain SGD only adds
_NAME = re.compile(r"^Optimizer\.step#(\w+)\.step$")


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run it. Host times are shares of one another, so a slow host stays slow."""

    step_us: float  # of the host, once a step
    tensor_us: float  # and for each tensor
    bytes_each: float  # for each parameter, at the full bandwidth
    launches: float  # for each million parameters, and a few at least
    fewest: int
    order: int

    def host_us(self, tensors: int) -> float:
        return self.step_us + self.tensor_us * tensors


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """What is updated."""

    name: str
    kinds: dict[str, Kind]
    state_bytes: int  # of a parameter in fp32 with what the optimizer keeps
    fused: bool = True  # has such a form on a device


def _kinds(
    loop: tuple[float, ...], foreach: tuple[float, ...], fused: tuple[float, ...]
) -> dict[str, Kind]:
    names = ("step_us", "tensor_us", "bytes_each", "launches")
    given = (("loop", loop, 8), ("foreach", foreach, 8), ("fused", fused, 4))
    return {
        name: Kind(**dict(zip(names, numbers, strict=True)), fewest=fewest, order=order)
        for order, (name, numbers, fewest) in enumerate(given)
    }


ADAM = Rule(
    name="Adam",
    kinds=_kinds((700, 107.0, 109.0, 0.0), (890, 17.0, 93.0, 0.42), (470, 6.0, 36.0, 0.06)),
    state_bytes=12,
)
MOMENTUM = Rule(
    name="SGD with momentum",
    kinds=_kinds((600, 42.0, 58.0, 0.0), (450, 8.9, 55.0, 0.2), (190, 5.3, 25.0, 0.05)),
    state_bytes=8,
)
PLAIN = Rule(
    name="SGD",
    kinds=_kinds((90, 14.0, 18.0, 0.0), (200, 1.9, 15.0, 0.05), (200, 1.8, 16.0, 0.05)),
    state_bytes=4,
)


def find_rule(context: StepContext) -> Rule:
    """By the name that torch writes around the optimizer's step; Adam's where there is none."""
    names = _optimizers(context)
    others = sorted(names - {"Adam", "AdamW", "SGD"})
    if others:
        return replace(ADAM, name=others[0], fused=False)
    if names == {"SGD"}:
        return MOMENTUM if any(_MOMENTUM.search(name) for name in _called(context)) else PLAIN
    return ADAM


def current_kind(context: StepContext) -> str | None:
    """By the names of what the optimizer's calls run."""
    if not stepping(context).any():
        return None
    names = _called(context)
    if any(_FUSED.search(name) for name in names):
        return "fused"
    lists = sum(bool(_FOREACH.search(name)) for name in names)
    return "foreach" if lists or any("multi_tensor" in name for name in names) else "loop"


def stepping(context: StepContext) -> Flags:
    """The optimizer's calls."""
    calls = context.graph.calls
    found: Flags = (calls.phase == Phase.OPTIMIZER) & (calls.kind != CallKind.WAIT)
    return found


def _called(context: StepContext) -> set[str]:
    """Operators and kernels."""
    host, device, strings = context.trace.host, context.trace.device, context.trace.strings
    mine = stepping(context)
    rows = context.graph.calls.operator[mine]
    names = {strings[host.name[row]] for row in rows[rows >= 0].tolist()}
    kernels = context.graph.tasks.row[mine[context.graph.tasks.call]]
    if len(device):
        names |= {strings[device.name[row]] for row in kernels[kernels >= 0].tolist()}
    return names


def _optimizers(context: StepContext) -> set[str]:
    host, strings = context.trace.host, context.trace.strings
    codes = distinct(host.name[host.kind == HostKind.ANNOTATION]).tolist()
    found = (_NAME.match(strings[code]) for code in codes)
    return {match[1] for match in found if match}
