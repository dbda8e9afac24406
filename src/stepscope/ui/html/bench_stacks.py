"""What a bench's workloads hold in memory and spend their steps on: one stacked bar each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.explain.memory.words import LABELS
from stepscope.records.figures import long_duration, milliseconds, percent, significant, size
from stepscope.records.memory import CATEGORIES
from stepscope.records.words import counted
from stepscope.ui.html.bench_rows import distinctions, short_name
from stepscope.ui.html.parts import slice_of
from stepscope.ui.words import PARTS, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from stepscope.records.bench_result import WorkloadResult

_LEAST_SHARE = 1e-4  # thinner pieces cannot be seen


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPiece:
    look: str  # classes of its colour
    share: float
    tip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadStack:
    """One workload's bar: `share` is its length where bars are drawn to one scale."""

    key: str
    name: str
    about: str
    total: str
    share: float
    pieces: tuple[StackPiece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackChart:
    id: str
    title: str
    caption: str
    to_scale: str  # the name of the view in which lengths are amounts
    key: tuple[tuple[str, str, str], ...]  # look, label, hint
    stacks: tuple[WorkloadStack, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
    """From the first loss to the last; places are percentages of the track's width."""

    key: str
    name: str
    about: str
    first_at: float
    last_at: float
    target_at: float | None
    tone: str  # reached, missed or unknown
    words: str
    outcome: str
    tip: str


def memory_chart(measured: Mapping[str, WorkloadResult]) -> StackChart | None:
    """None where no workload has its memory by category."""
    held = {key: result for key, result in measured.items() if any(result.memory.values())}
    looks = {name: (f"m-{name}", LABELS[name], "") for name in CATEGORIES}
    return _chart(
        held,
        lambda result: result.memory,
        looks,
        size,
        name="memory",
        title="What is in memory at the peak",
        to_scale="bytes",
        caption="Bytes at the moment of the peak, by their use.",
    )


def budget_chart(measured: Mapping[str, WorkloadResult]) -> StackChart | None:
    """None where no workload's step was divided."""
    divided = {key: result for key, result in measured.items() if any(result.budget_ms.values())}
    looks = {}
    for name in PARTS:
        part = slice_of(name)
        pattern = " is-idle" if part.idle else " is-stall" if part.stall else ""
        looks[name] = (f"bg-{part.color}{pattern}", part.label, part.hint)
    return _chart(
        divided,
        lambda result: result.budget_ms,
        looks,
        milliseconds,
        name="budget",
        title="Where the step goes",
        to_scale="milliseconds",
        caption="The parts add up to the step. Striped: the device is idle.",
    )


_Look = tuple[str, str, str]


def _chart(
    measured: Mapping[str, WorkloadResult],
    amounts: Callable[[WorkloadResult], Mapping[str, float]],
    looks: Mapping[str, _Look],
    words: Callable[[float], str],
    *,
    name: str,
    title: str,
    to_scale: str,
    caption: str,
) -> StackChart | None:
    if not measured:
        return None
    results = list(measured.values())
    largest = max(_whole(amounts(result)) for result in results)
    used = {name for result in results for name, amount in amounts(result).items() if amount > 0}
    order = [*(name for name in looks if name in used), *sorted(used - looks.keys())]
    known = {name: looks.get(name) or _unknown(name) for name in order}
    abouts = distinctions(results)
    return StackChart(
        id=name,
        title=title,
        caption=caption,
        to_scale=to_scale,
        key=tuple(known.values()),
        stacks=tuple(
            WorkloadStack(
                key=key,
                name=short_name(result.name),
                about=about,
                total=words(_whole(amounts(result))),
                share=_whole(amounts(result)) / largest,
                pieces=tuple(_pieces(amounts(result), known, words)),
            )
            for (key, result), about in zip(measured.items(), abouts, strict=True)
        ),
    )


def _unknown(name: str) -> _Look:
    """A part that a later version of stepscope wrote down."""
    return "bg-other", one_line(name), ""


def _whole(amounts: Mapping[str, float]) -> float:
    return sum(amount for amount in amounts.values() if amount > 0)


def _pieces(
    amounts: Mapping[str, float], looks: Mapping[str, _Look], words: Callable[[float], str]
) -> Iterable[StackPiece]:
    whole = _whole(amounts)
    for name, (look, label, hint) in looks.items():
        amount = amounts.get(name, 0.0)
        if amount < _LEAST_SHARE * whole:
            continue
        share = amount / whole
        lines = [f"{label}: {words(amount)}, {percent(share)}", *([hint] if hint else [])]
        yield StackPiece(look=look, share=share, tip="\n".join(lines))


def loss_rows(measured: Mapping[str, WorkloadResult]) -> list[LossRow]:
    """Workloads whose first and last loss are known. Each has a scale of its own."""
    known = {
        key: (result, result.loss_first, result.loss_last)
        for key, result in measured.items()
        if result.loss_first is not None and result.loss_last is not None
    }
    abouts = distinctions([result for result, _, _ in known.values()])
    return [
        _loss_row(key, result, first, last, about)
        for (key, (result, first, last)), about in zip(known.items(), abouts, strict=True)
    ]


def _loss_row(key: str, result: WorkloadResult, first: float, last: float, about: str) -> LossRow:
    target = result.target_loss
    at = _places([value for value in (first, last, target) if value is not None])
    words = f"{significant(first)} → {significant(last)}"
    return LossRow(
        key=key,
        name=short_name(result.name),
        about=about,
        first_at=at(first),
        last_at=at(last),
        target_at=None if target is None else at(target),
        tone={True: "reached", False: "missed", None: "unknown"}[result.target_reached],
        words=words,
        outcome=_outcome(result),
        tip=f"Loss {words}" + ("" if target is None else f"\ntarget {significant(target)}"),
    )


def _places(values: Sequence[float]) -> Callable[[float], float]:
    """From zero, or from the least where losses are negative, to the largest.

    A loss that is no longer a number lies at the far end.
    """
    finite = [0.0, *(value for value in values if math.isfinite(value))]
    low, high = min(finite), max(finite)
    width = (high - low) or 1.0
    return lambda value: 2 + 96 * ((value - low) / width if math.isfinite(value) else 1.0)


def _outcome(result: WorkloadResult) -> str:
    if result.target_reached is None:
        return "not known" if result.target_loss is not None else "no target"
    if not result.target_reached:
        return "not reached"
    words = "reached"
    if result.steps_to_target is not None:
        words += f" in {counted(result.steps_to_target, 'step')}"
    if result.time_to_target_s is not None:
        words += f", {long_duration(result.time_to_target_s * 1e9)}"
    return words
