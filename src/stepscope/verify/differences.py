"""What changed between two explanations: parts of the step, kernels, operators; in ms per step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.explain.budget import mean_budget
from stepscope.records.comparison import NameChange, PartChange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from stepscope.records.comparison import PhaseChange, Side
    from stepscope.records.explanation import Budget, Explanation, RankExplanation

    Row = tuple[str, float, float]  # name, ns, calls
    Table = dict[str, tuple[float, float]]  # name -> (ns, calls)

MOST_ROWS = 100


def part_changes(
    both: tuple[Explanation, Explanation],
    sides: tuple[Side, Side],
    stalls: Sequence[PhaseChange] = (),
    *,
    as_recorded: bool = False,
) -> tuple[PartChange, ...]:
    """Each side's step, split as its trace is, and its stalls. All parts are listed, so that they
    add up to the steps that are compared.

    Steps under the profiler are split `as_recorded`, with its overhead.
    """
    budgets = [_as_recorded(x) if as_recorded else x.budget for x in both]
    stalled = [{row.id: row.a_ms for row in stalls}, {row.id: row.b_ms for row in stalls}]
    parts = [
        _parts(budget, side.ms - sum(own.values())) | own
        for budget, side, own in zip(budgets, sides, stalled, strict=True)
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


def _parts(budget: Budget, typical_ms: float) -> dict[str, float]:
    """The typical step, divided as the window is."""
    parts = [part for part in budget.parts if not part.id.startswith("stall_")]
    whole = sum(part.ms for part in parts)
    return {part.id: part.ms / whole * typical_ms if whole else 0.0 for part in parts}


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

    def rows(rank: RankExplanation) -> Iterator[Row]:
        for row in rank.operators:
            yield row.name, row.device_self_ns if on_device else row.host_self_ns, row.calls

    return _changes(_mean_step(a, rows), _mean_step(b, rows))


def _on_device(*both: Explanation) -> bool:
    return any(rank.launches.device_events for side in both for rank in side.ranks)


def _kernels(rank: RankExplanation) -> Iterator[Row]:
    """The kernels that the steps launched, if that is known: a window opens on earlier work."""
    for row in rank.kernels:
        if row.steps_ns is None or row.steps_count is None:
            yield row.name, row.total_ns, row.count
        elif row.steps_count:
            yield row.name, row.steps_ns, row.steps_count


def _mean_step(explanation: Explanation, rows: Callable[[RankExplanation], Iterable[Row]]) -> Table:
    """One step, averaged over steps and ranks."""
    means: Table = {}
    for rank in explanation.ranks:
        sums: Table = {}
        _add(sums, rows(rank))
        share = 1 / (len(explanation.ranks) * max(1, len(rank.steps.steps)))
        _add(means, ((name, ns * share, calls * share) for name, (ns, calls) in sums.items()))
    return means


def _add(table: Table, rows: Iterable[Row]) -> None:
    for name, ns, calls in rows:
        known = table.get(name, (0.0, 0.0))
        table[name] = (known[0] + ns, known[1] + calls)


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
