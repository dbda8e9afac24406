"""Which traits of the step changed from A to B, as far as both sides captured them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from stepscope.records.comparison import ComparedFacts, Difference
from stepscope.records.figures import milliseconds
from stepscope.verify.traits import Traits, batch_growth, common_factor, read_traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.comparison import PhaseChange
    from stepscope.records.explanation import Explanation

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
    traits = [*_words_of_both(before, after), *_counts_of_both(before, after)]
    for compare in (_parameters, _batch, _products_per_step, _blocking):
        traits += compare(before, after)
    traits += _data_loading(phases, step_ms)
    traits += _stalled(phases, step_ms)
    return ComparedFacts(
        looked_at=tuple(row.name for row in traits),
        changed=tuple(row for row in traits if row.a != row.b),
    )


def _words_of_both(a: Traits, b: Traits) -> list[Difference]:
    return [
        Difference(name=name, a=a.words[name], b=b.words[name])
        for name in a.words
        if name in b.words
    ]


def _counts_of_both(a: Traits, b: Traits) -> list[Difference]:
    """Threads and workers, if capture counted them."""
    before, after = _counts(a.facts), _counts(b.facts)
    return [
        Difference(name=name, a=str(before[name]), b=str(after[name]))
        for name in before
        if name in after
    ]


def _counts(facts: dict[str, Any]) -> dict[str, int]:
    """From the facts themselves and from the tables among them."""
    tables = [facts, *(value for value in facts.values() if isinstance(value, dict))]
    return _loader_workers(facts) | {
        name: value
        for table in tables
        for name, value in table.items()
        if str(name).endswith(_COUNTED) and isinstance(value, int)
    }


def _loader_workers(facts: dict[str, Any]) -> dict[str, int]:
    """Of the DataLoader that fed most of the training."""
    loaders = (facts.get("data") or {}).get("loaders", ())
    feeding = [loader for loader in loaders if loader["trains"] and loader["batches"]]
    most = max(feeding, key=lambda loader: loader["batches"], default=None)
    return {"loader-workers": most["workers"]} if most else {}


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
    """From the shapes of products in every step; a last, shorter batch does not count."""
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


def _stalled(phases: Sequence[PhaseChange], step_ms: float) -> list[Difference]:
    """All causes together; nothing where no step of either side stalled."""
    rows = [row for row in phases if row.id.startswith("stall_")]
    return [_moved("stalls", rows, step_ms)] if rows else []


def _moved(name: str, rows: Sequence[PhaseChange], step_ms: float) -> Difference:
    a, b = sum(row.a_ms for row in rows), sum(row.b_ms for row in rows)
    reach = math.hypot(*((row.high_ms - row.low_ms) / 2 for row in rows))
    change = sum(row.change_ms for row in rows)
    changed = abs(change) > reach and abs(change) >= _DATA_SHARE * step_ms
    return Difference(name=name, a=milliseconds(a), b=milliseconds(b if changed else a))
