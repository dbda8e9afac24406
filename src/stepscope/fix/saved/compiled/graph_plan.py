"""What the plan of one compiled graph says: what is kept, what is recomputed, what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stepscope.fix.saved.compiled.graph_memory import SimulatedStep, kept_values
from stepscope.fix.saved.compiled.recompute_ladder import LadderStep
from stepscope.fix.saved.compiled.step_graph import GraphValue, StepGraph, operator_name
from stepscope.fix.saved.save_plan import KEEP, RECOMPUTE, PlanRow
from stepscope.records.change_values import MemoryTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderPoint:
    """The lowest peak for a share of added time."""

    share: float
    peak_bytes: int
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """Bytes are of what this graph's forward and backward make, without weights."""

    rows: tuple[PlanRow, ...]
    saved_bytes_before: int
    saved_bytes: int
    peak_bytes_before: int
    peak_bytes: int
    step_ns: int
    extra_ns: int
    planning_ns: int
    gradient_bytes: int  # what backward leaves, counted in its peaks
    target: str
    repeated: int  # operators
    ladder: tuple[LadderPoint, ...] = ()

    def with_ladder(self, shares: Sequence[float], steps: Sequence[SimulatedStep]) -> GraphPlan:
        points = tuple(
            LadderPoint(share=share, peak_bytes=step.peak_bytes, time_ns=step.time_ns)
            for share, step in zip(shares, steps, strict=True)
        )
        return replace(self, ladder=points)


def describe(
    graph: StepGraph,
    plain: SimulatedStep,
    chosen: LadderStep,
    target: MemoryTarget,
    planning_ns: int,
) -> GraphPlan:
    repeated = set(chosen.repeated)
    kept = kept_values(graph, repeated)
    values = {*graph.saved, *kept}
    rows = [
        _row(value, RECOMPUTE if value in repeated else KEEP)
        for value in sorted(values, key=lambda value: value.number)
        if not value.free
    ]
    return GraphPlan(
        rows=tuple(rows),
        saved_bytes_before=plain.saved_bytes,
        saved_bytes=chosen.step.saved_bytes,
        peak_bytes_before=plain.peak_bytes,
        peak_bytes=chosen.step.peak_bytes,
        step_ns=plain.time_ns,
        extra_ns=max(0, chosen.step.time_ns - plain.time_ns),
        planning_ns=planning_ns,
        gradient_bytes=sum(value.size_bytes for value in graph.gradients),
        target=target.text,
        repeated=len(repeated),
    )


def _row(value: GraphValue, action: str) -> PlanRow:
    tensor = value.node.meta["val"]
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return PlanRow(
        value=f"{shape} {str(tensor.dtype).removeprefix('torch.')}",
        module=_module(value),
        operator=operator_name(value.node),
        size_bytes=value.size_bytes,
        held_bytes=value.size_bytes if action == KEEP else 0,
        action=action,
        cost_ns=value.cost_ns if action == RECOMPUTE else 0,
        was_kept=value.saved,
    )


def _module(value: GraphValue) -> str:
    """Return the path of the module that made the value, as the compiler noted it."""
    stack = value.node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if isinstance(entry, tuple)]
    return str(paths[-1]).removeprefix("L['self'].") if paths else ""
