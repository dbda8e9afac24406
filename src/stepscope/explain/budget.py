"""The step, divided: the shares of one steady cycle, in milliseconds of the step of record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.explain.quantiles import median
from stepscope.records.explanation import Budget, Part

if TYPE_CHECKING:
    from stepscope.records.explanation import Idle, RankExplanation, Steps, StepTime, Timeline


def step_time(steps: Steps, timeline: Timeline) -> float | None:
    """The profiled step in ms: the median cycle, else the median step, else the whole window."""
    if steps.cycles_ns:
        return median(steps.cycles_ns) / 1e6
    if len(steps.steps) == 1 and timeline.span_ns:
        return max(steps.steps[0].dur_ns, timeline.span_ns) / 1e6
    if steps.steps:
        return median([step.dur_ns for step in steps.steps]) / 1e6
    return timeline.span_ns / 1e6 if timeline.span_ns else None


def make_budget(steps: Steps, step: StepTime, timeline: Timeline, idle: Idle) -> Budget:
    """`timeline` and `idle` cover the same window as the cycles."""
    slices = {
        "compute": timeline.compute_ns,
        "exposed_comm": timeline.exposed_comm_ns,
        "exposed_memory": timeline.exposed_memory_ns,
        "data_loading": idle.data_loading_ns,
        "sync": idle.sync_ns,
        "operators": idle.operators_ns,
        "python": idle.python_ns,
        "profiler": idle.profiler_ns,
        "idle_launch": idle.launch_ns,
        "idle_other": idle.other_ns,
    }
    span, ms = timeline.span_ns or 1, step.profiled or 0.0
    parts = [Part(id=name, ms=ms * ns / span, share=ns / span) for name, ns in slices.items()]
    return Budget(step_ms=ms, parts=tuple(parts), basis="cycles" if steps.cycles_ns else "window")


def mean_budget(ranks: tuple[RankExplanation, ...]) -> Budget:
    """The mean shares of all ranks that recorded something, over the slowest rank's step."""
    budgets = [rank.budget for rank in ranks if _divides(rank.budget)] or [ranks[0].budget]
    if len(budgets) == 1:
        return budgets[0]
    ms = max(budget.step_ms for budget in budgets)
    shares: dict[str, float] = {}  # not every rank has the same stalls
    for part in (part for budget in budgets for part in budget.parts):
        shares[part.id] = shares.get(part.id, 0.0) + part.share / len(budgets)
    bases = {budget.basis for budget in budgets}
    return Budget(
        step_ms=ms,
        parts=tuple(Part(id=name, ms=ms * share, share=share) for name, share in shares.items()),
        basis=bases.pop() if len(bases) == 1 else "window",
    )


def stretched(budget: Budget, step_ms: float) -> Budget:
    """The same shares of a step with another length."""
    parts = tuple(replace(part, ms=part.share * step_ms) for part in budget.parts)
    return replace(budget, step_ms=step_ms, parts=parts)


def _divides(budget: Budget) -> bool:
    """Whether there was any work: steps without it have a length but no shares."""
    return bool(budget.step_ms) and any(part.share for part in budget.parts)
