"""What moved between two explanations: parts of the budget, kernels, operators. Per step, in ms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.explain.budget import mean_budget
from stepscope.records.comparison import NameChange, PartChange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stepscope.records.comparison import Side, StepsAre
    from stepscope.records.explanation import Budget, Explanation, RankExplanation

    # name -> (ns, calls) of all steps
    Table = dict[str, tuple[float, float]]

MOST_ROWS = 100


def part_changes(
    explained: tuple[Explanation, Explanation], sides: tuple[Side, Side], steps_are: StepsAre
) -> tuple[PartChange, ...]:
    """Each side's step, divided as its trace says; in the budget's order, and all of them, so that
    they add up to the steps that are compared.

    Steps that were profiled are divided as they were recorded, with what the profiler added.
    """
    budgets = [_as_recorded(x) if steps_are == "profiled" else x.budget for x in explained]
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
    """By name, the largest change first: those that came, went, or take another time.

    None where nothing ran on a device: a CPU's kernels are its operators.
    """
    return _moved(_each(a, _kernels), _each(b, _kernels)) if _on_device(a, b) else ()


def operator_changes(a: Explanation, b: Explanation) -> tuple[NameChange, ...]:
    """By name, whatever the shapes: own device time; own host time where nothing has a device."""
    on_device = _on_device(a, b)

    def table(rank: RankExplanation) -> Table:
        out: Table = {}
        for row in rank.operators:
            ns, calls = out.get(row.name, (0.0, 0.0))
            own = row.device_self_ns if on_device else row.host_self_ns
            out[row.name] = (ns + own, calls + row.calls)
        return out

    return _moved(_each(a, table), _each(b, table))


def _on_device(*both: Explanation) -> bool:
    return any(rank.launches.device_events for each in both for rank in each.ranks)


def _kernels(rank: RankExplanation) -> Table:
    """Those that the steps launched, where that is known: a window opens on others' leftovers."""
    out: Table = {}
    for row in rank.kernels:
        ns, calls = out.get(row.name, (0.0, 0.0))
        of_steps = row.steps_count is not None and row.steps_ns is not None
        own, count = (row.steps_ns, row.steps_count) if of_steps else (row.total_ns, row.count)
        if count:
            out[row.name] = (ns + (own or 0), calls + count)
    return out


def _each(explanation: Explanation, table: Callable[[RankExplanation], Table]) -> Table:
    """A step of a mean rank."""
    out: Table = {}
    for rank in explanation.ranks:
        share = 1 / (len(explanation.ranks) * max(1, len(rank.steps.steps)))
        for name, (ns, calls) in table(rank).items():
            known = out.get(name, (0.0, 0.0))
            out[name] = (known[0] + ns * share, known[1] + calls * share)
    return out


def _moved(a: Table, b: Table) -> tuple[NameChange, ...]:
    rows = (_row(name, a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b)))
    return _largest(row for row in rows if row.change_ms)


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


def _largest(rows: Iterable[NameChange]) -> tuple[NameChange, ...]:
    return tuple(sorted(rows, key=lambda row: -abs(row.change_ms))[:MOST_ROWS])
