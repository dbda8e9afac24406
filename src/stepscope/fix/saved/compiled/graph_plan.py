"""What the plan of one compiled graph says: what is kept, what is recomputed, what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stepscope.fix.saved.compiled.graph_memory import SimulatedStep, kept_values
from stepscope.fix.saved.compiled.joint_graph import GraphValue, JointGraph, operator_name
from stepscope.fix.saved.compiled.recompute_ladder import LadderStep
from stepscope.fix.saved.save_plan import KEEP, RECOMPUTE, LadderPoint, PlanRow, SavePlan
from stepscope.records.change_values import MemoryTarget


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
    repeated: int  # operators
    ladder: tuple[LadderPoint, ...] = ()

    def with_ladder(self, shares: Sequence[float], steps: Sequence[SimulatedStep]) -> GraphPlan:
        points = tuple(
            LadderPoint(
                share=share,
                saved_bytes=step.saved_bytes,
                peak_bytes=step.peak_bytes,
                step_ns=step.time_ns,
            )
            for share, step in zip(shares, steps, strict=True)
        )
        return replace(self, ladder=points)


def describe(
    graph: JointGraph,
    plain: SimulatedStep,
    chosen: LadderStep,
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
        repeated=len(repeated),
    )


def join(graphs: Sequence[GraphPlan], target: MemoryTarget) -> SavePlan:
    """Return the plan of a model that was compiled into several graphs, in forward's order."""
    before = _joint_peak([(plan.saved_bytes_before, plan.peak_bytes_before) for plan in graphs])
    after = _joint_peak([(plan.saved_bytes, plan.peak_bytes) for plan in graphs])
    return SavePlan(
        operators=(),
        repeated=(),
        results=(),
        uses=(),
        rows=tuple(row for plan in graphs for row in plan.rows),
        saved_bytes_before=sum(plan.saved_bytes_before for plan in graphs),
        saved_bytes=sum(plan.saved_bytes for plan in graphs),
        peak_bytes_before=before,
        peak_bytes=after,
        extra_ns=sum(plan.extra_ns for plan in graphs),
        step_ns=sum(plan.step_ns for plan in graphs),
        target=target.text,
        ladder=_joint_ladder(graphs),
    )


def _joint_peak(graphs: Sequence[tuple[int, int]]) -> int:
    """Return the peak of (saved, peak) graphs: what earlier ones save is there meanwhile."""
    saved, highest = 0, 0
    for saved_bytes, peak_bytes in graphs:
        highest = max(highest, saved + peak_bytes)
        saved += saved_bytes
    return highest


def _joint_ladder(graphs: Sequence[GraphPlan]) -> tuple[LadderPoint, ...]:
    return tuple(
        LadderPoint(
            share=points[0].share,
            saved_bytes=sum(point.saved_bytes for point in points),
            peak_bytes=_joint_peak([(point.saved_bytes, point.peak_bytes) for point in points]),
            step_ns=sum(point.step_ns for point in points),
        )
        for points in zip(*(plan.ladder for plan in graphs), strict=False)
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
