"""What changed between two explanations: parts of the step, kernels, operators; in ms per step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.explain.budget import mean_budget
from stepscope.records.comparison import NameChange, PartChange

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.records.comparison import Side, StepsAre
    from stepscope.records.explanation import Budget, Explanation, RankExplanation

    # name -> (ns, calls) of all steps
    Table = dict[str, tuple[float, float]]

MOST_ROWS = 100


def part_changes(
    both: tuple[Explanation, Explanation], sides: tuple[Side, Side], steps_are: StepsAre
) -> tuple[PartChange, ...]:
    """Each side's step, split as its trace is. All parts are listed, so that they add up to the
    steps that are compared.

    Profiled steps are split as recorded, with the profiler's overhead.
    """
    budgets = [_as_recorded(x) if steps_are == "profiled" else x.budget for x in both]
    parts = [
        {part.id: part.share * side.ms for part in budget.parts}
        for budget, side in zip(budgets, sides, strict=True)
    ]
    return tuple(
        PartChange(
            id=name,
            a_ms=parts[0].get(name, 0.0),
            b_ms=parts[1].get(name, 0.0),
            change_ms=parts[1].get(name, 0.0) - parts[0].get(name, 0.0),
        )
        for name in dict.fromkeys((*parts[0], *parts[1]))
    )


def _as_recorded(explanation: Explanation) -> Budget:
    ranks = (replace(x, budget=x.profiled_budget or x.budget) for x in explanation.ranks)
    return mean_budget(tuple(ranks))


def kernel_changes(a: Explanation, b: Explanation) -> tuple[NameChange, ...]:
    """By name, the largest change first: new ones, gone ones, and those that take another time.

    Empty if nothing ran on a device: a CPU's kernels are its operators.
    """
    return _changes(_mean_step(a, _kernels), _mean_step(b, _kernels)) if _on_device(a, b) else ()


def operator_changes(a: Explanation, b: Explanation) -> tuple[NameChange, ...]:
    """By name, whatever the shapes: own device time, or own host time on a CPU."""
    on_device = _on_device(a, b)

    def table(rank: RankExplanation) -> Table:
        out: Table = {}
        for row in rank.operators:
            ns, calls = out.get(row.name, (0.0, 0.0))
            own = row.device_self_ns if on_device else row.host_self_ns
            out[row.name] = (ns + own, calls + row.calls)
        return out

    return _changes(_mean_step(a, table), _mean_step(b, table))


def _on_device(*both: Explanation) -> bool:
    return any(rank.launches.device_events for side in both for rank in side.ranks)


def _kernels(rank: RankExplanation) -> Table:
    """The kernels that the steps launched, if that is known: a window opens on earlier work."""
    out: Table = {}
    for row in rank.kernels:
        ns, calls = out.get(row.name, (0.0, 0.0))
        of_steps = row.steps_count is not None and row.steps_ns is not None
        own, count = (row.steps_ns, row.steps_count) if of_steps else (row.total_ns, row.count)
        if count:
            out[row.name] = (ns + (own or 0), calls + count)
    return out


def _mean_step(explanation: Explanation, table: Callable[[RankExplanation], Table]) -> Table:
    """One step, averaged over steps and ranks."""
    out: Table = {}
    for rank in explanation.ranks:
        share = 1 / (len(explanation.ranks) * max(1, len(rank.steps.steps)))
        for name, (ns, calls) in table(rank).items():
            known = out.get(name, (0.0, 0.0))
            out[name] = (known[0] + ns * share, known[1] + calls * share)
    return out


def _changes(a: Table, b: Table) -> tuple[NameChange, ...]:
    rows = (_row(name, a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b)))
    changed = (row for row in rows if row.change_ms)
    return tuple(sorted(changed, key=lambda row: -abs(row.change_ms))[:MOST_ROWS])


def _row(
    name: str, before: tuple[float, float] | None, after: tuple[float, float] | None
) -> NameChange:
    a_ms = before[0] / 1e6 if before else None
    b_ms = after[0] / 1e6 if after else None
    return NameChange(
        name=name,
        a_ms=a_ms,
        b_ms=b_ms,
        change_ms=(b_ms or 0.0) - (a_ms or 0.0),
        a_calls=before[1] if before else None,
        b_calls=after[1] if after else None,
    )
