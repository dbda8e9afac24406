"""Find what else changed from A to B: parts of the step, kernels and operators in ms per
step, and the traits that both sides captured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from stepscope.records.comparison import (
    ComparedFacts,
    Difference,
    NameChange,
    PartChange,
    PhaseChange,
    Side,
)
from stepscope.records.explanation import Budget, Explanation, RankExplanation
from stepscope.step.timeline import mean_budget
from stepscope.text.figures import milliseconds
from stepscope.verify.traits import Traits, batch_growth, common_factor, read_traits

if TYPE_CHECKING:
    Row = tuple[str, float, float]
    Table = dict[str, tuple[float, float]]

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
    """List kernels by name, the largest change first: new ones, gone ones, and those that take
    another time.

    Empty if nothing ran on a device: a CPU's kernels are its operators.
    """
    return _changes(_mean_step(a, _kernels), _mean_step(b, _kernels)) if _on_device(a, b) else ()


def operator_changes(a: Explanation, b: Explanation) -> tuple[NameChange, ...]:
    """List operators by name, whatever the shapes: own device time, or own host time on a CPU."""
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


# Which traits of the step changed from A to B, as far as both sides captured them.

_MORE_PRODUCTS = 0.05  # products per step differ by more: the step does other work
_DATA_SHARE = 0.05  # of the step: a smaller change of the data phase does not count
_SEVERAL_TIMES = 2.0  # blocking calls differ by this factor, and by at least one per step
_COUNTED = ("threads", "workers")  # names of counted facts end so


def compare_traits(
    a: tuple[dict[str, Any], Explanation | None],
    b: tuple[dict[str, Any], Explanation | None],
    phases: Sequence[PhaseChange],
    step_ms: float,
) -> ComparedFacts:
    """`a` and `b` are each side's facts and explanation; `phases` holds phases and stalls;
    `step_ms` is A's step."""
    before, after = read_traits(*a), read_traits(*b)
    counts = _counts(before.facts), _counts(after.facts)  # threads and workers
    traits = [*_of_both(before.words, after.words), *_of_both(*counts)]
    for compare in (_parameters, _batch, _products_per_step, _blocking):
        traits += compare(before, after)
    traits += _data_loading(phases, step_ms)
    # All causes together; nothing where no step of either side stalled.
    rows = [row for row in phases if row.id.startswith("stall_")]
    traits += [_moved("stalls", rows, step_ms)] if rows else []
    return ComparedFacts(
        looked_at=tuple(row.name for row in traits),
        changed=tuple(row for row in traits if row.a != row.b),
    )


def _of_both(a: Mapping[str, object], b: Mapping[str, object]) -> list[Difference]:
    return [Difference(name=name, a=str(a[name]), b=str(b[name])) for name in a if name in b]


def _counts(facts: dict[str, Any]) -> dict[str, int]:
    """Take counts from the facts themselves and from the tables among them."""
    tables = [facts, *(value for value in facts.values() if isinstance(value, dict))]
    # Of the DataLoader that fed most of the training.
    loaders = (facts.get("data") or {}).get("loaders", ())
    feeding = [loader for loader in loaders if loader["trains"] and loader["batches"]]
    most = max(feeding, key=lambda loader: loader["batches"], default=None)
    return ({"loader-workers": most["workers"]} if most else {}) | {
        name: value
        for table in tables
        for name, value in table.items()
        if str(name).endswith(_COUNTED) and isinstance(value, int)
    }


def _parameters(a: Traits, b: Traits) -> list[Difference]:
    """Each parameter accumulates one gradient per micro-batch."""
    if not a.gradients or not b.gradients:
        return []
    factor = common_factor(a.gradients, b.gradients)
    if factor is None:
        words = [f"{sum(side.gradients.values()):.4g} tensors a step" for side in (a, b)]
        if words[0] == words[1]:
            words[1] += " of other shapes"
        return [Difference(name="parameters", a=words[0], b=words[1])]
    return [
        Difference(name="parameters", a="the same", b="the same"),
        Difference(name="micro-batches", a="1", b=f"{factor:.4g}"),
    ]


def _batch(a: Traits, b: Traits) -> list[Difference]:
    """Read the batch from the shapes of products in every step; a last, shorter batch does not
    count."""
    before, after = ({key for key, calls in side.products.items() if calls >= 1} for side in (a, b))
    if not before or not after:
        return []
    same_shapes = [Difference(name="shapes", a="the same", b="the same")]
    if before == after:
        return [Difference(name="batch", a="the same", b="the same"), *same_shapes]
    growth = batch_growth((shapes for _, shapes in before), (shapes for _, shapes in after))
    same_model = common_factor(a.gradients, b.gradients)  # else it may be wider
    if growth is not None and same_model:
        return [Difference(name="batch", a=str(growth[0]), b=str(growth[1])), *same_shapes]
    only = [sorted(mine - others) for mine, others in ((before, after), (after, before))]
    words = [f"{name} {list(map(list, shapes))}" for side in only for name, shapes in side[:1]]
    if len(words) < 2:
        words = [f"{len(side)} kinds of matmuls" for side in (before, after)]
    return [Difference(name="shapes", a=words[0], b=words[1])]


def _products_per_step(a: Traits, b: Traits) -> list[Difference]:
    """Per micro-batch: a step that recomputes has more."""
    passes = common_factor(a.gradients, b.gradients)
    if passes is None or not a.products or not b.products:
        return []
    before, after = (sum(side.products.values()) for side in (a, b))
    same = abs(after / passes / before - 1) < _MORE_PRODUCTS
    words = f"{before:.4g}", f"{before if same else after / passes:.4g}"
    return [Difference(name="matmuls per step", a=words[0], b=words[1])]


def _blocking(a: Traits, b: Traits) -> list[Difference]:
    if a.blocking is None or b.blocking is None:
        return []
    few, many = sorted((a.blocking, b.blocking))
    same = many - few < 1 or many < _SEVERAL_TIMES * few
    words = f"{a.blocking:.4g} per step", f"{a.blocking if same else b.blocking:.4g} per step"
    return [Difference(name="blocking calls", a=words[0], b=words[1])]


def _data_loading(phases: Sequence[PhaseChange], step_ms: float) -> list[Difference]:
    """The typical wait and stalls. Counts only if it changed by more than chance and by a good part
    of the step."""
    if not any(row.id == "data" for row in phases):
        return []
    return [_moved("data loading", [r for r in phases if r.id in ("data", "stall_data")], step_ms)]


def _moved(name: str, rows: Sequence[PhaseChange], step_ms: float) -> Difference:
    a, b = sum(row.a_ms for row in rows), sum(row.b_ms for row in rows)
    reach = math.hypot(*((row.high_ms - row.low_ms) / 2 for row in rows))
    change = sum(row.change_ms for row in rows)
    changed = abs(change) > reach and abs(change) >= _DATA_SHARE * step_ms
    return Difference(name=name, a=milliseconds(a), b=milliseconds(b if changed else a))
