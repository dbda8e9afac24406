"""A comparison in sentences, and as JSON (schema 1) for other programs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import to_builtins

from stepscope.records.words import counted
from stepscope.ui.words import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepscope.records.comparison import Comparison, OpenPromise, Side
    from stepscope.records.promise import TrackedPromise

SCHEMA = 1
_TOLD_PARTS = 3
_WORTH_TELLING = 0.005  # of the step
_LEAST_TOLD = 0.0001  # a change that nobody asks about


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict, why, next."""

    verdict: str
    why: str
    next: str


def words_of(comparison: Comparison) -> Words:
    return Words(verdict=_verdict(comparison), why=_why(comparison), next=_next(comparison))


def percent(share: float, *, sign: bool = False) -> str:
    """Two digits that count, never more than two behind the point."""
    size = abs(share * 100)
    if size < 0.005:
        return "0%"
    digits = 0 if size >= 20 else 1 if size >= 2 else 2
    return f"{share * 100:{'+' if sign else ''}.{digits}f}%"


def milliseconds(ms: float) -> str:
    """Two digits behind the point, and below a millisecond as many as make four that count."""
    return f"{ms:.{2 if ms >= 1 else min(12, 3 - math.floor(math.log10(ms)))}f}" if ms else "0.00"


def interval(low: float, high: float) -> str:
    return f"{percent(low, sign=True)} to {percent(high, sign=True)}"


def steps_words(comparison: Comparison) -> str:
    """How much each side knows."""
    told = [_side_words(side) for side in (comparison.a, comparison.b)]
    kind = {"profiled": " under the profiler", "measured": "", "listed": ""}
    return f"A {told[0]}, B {told[1]}{kind[comparison.steps_are]}"


def whole_steps(comparison: Comparison) -> tuple[float, float]:
    """What the parts of each side add up to: the steps that the verdict names."""
    return sum(row.a_ms for row in comparison.budget), sum(row.b_ms for row in comparison.budget)


def promise_words(kept: TrackedPromise) -> str:
    """What was promised, what came of it."""
    promise, delivered = kept.promise, kept.delivered_ms
    said = (
        f"{promise.words} was promised to give {promise.predicted_ms:.2f} ms "
        f"({promise.low_ms:.2f} to {promise.high_ms:.2f})"
    )
    if delivered is None or kept.error is None:
        return f"{said}; not tried yet"
    place = "inside the interval" if kept.inside else "outside the interval"
    return f"{said} and gave {delivered:.2f} ms: {percent(kept.error, sign=True)}, {place}"


def open_words(promise: OpenPromise) -> str:
    """Why a promise is not answered."""
    return f"{promise.words} ({promise.id}) stays open: {promise.why}"


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """`compare --json` and `ab --json`."""
    words = words_of(comparison)
    found: dict[str, Any] = to_builtins(comparison)
    found |= {
        "schema": SCHEMA,
        "sentence": words.verdict,
        "why": words.why,
        "next": words.next,
        "promise": _promise(comparison.promise),
    }
    return {"schema": SCHEMA, **found}


def _promise(kept: TrackedPromise | None) -> dict[str, Any] | None:
    if kept is None:
        return None
    return {
        **to_builtins(kept),
        "delivered_ms": kept.delivered_ms,
        "error": kept.error,
        "inside": kept.inside,
    }


def _verdict(comparison: Comparison) -> str:
    sure = f"{comparison.confidence:.0%} interval {interval(comparison.low, comparison.high)}"
    a, b = milliseconds(comparison.a_ms), milliseconds(comparison.b_ms)
    if comparison.verdict == "no difference seen":
        change = percent(comparison.change, sign=True)
        return f"No difference seen: {a} and {b} ms a step, {change} ({sure})."
    more = "less" if comparison.verdict == "faster" else "more"
    size = percent(abs(comparison.change))
    return f"B is {comparison.verdict}: {a} -> {b} ms a step, {size} {more} ({sure})."


def _why(comparison: Comparison) -> str:
    told = []
    if comparison.verdict == "no difference seen":
        seen = _smallest(comparison.smallest_detectable)
        told.append(f"a change of {seen} would have been found four times out of five")
        if not comparison.steps_low <= 0 <= comparison.steps_high:
            told.append(
                "these runs' own steps differ by "
                f"{interval(comparison.steps_low, comparison.steps_high)}, which two starts of one "
                "command may do as well"
            )
    moved = _moved_words(comparison)
    if moved and comparison.verdict != "no difference seen":
        told.append(moved)
    told.append(steps_words(comparison))
    return "; ".join(told)


def _smallest(share: float) -> str:
    return percent(share) if share >= _LEAST_TOLD else f"less than {percent(_LEAST_TOLD)}"


def _moved_words(comparison: Comparison) -> str:
    """Phases that moved beyond chance, over all measured steps.

    Never the budget of a few traced steps, unless these are the steps that are compared.
    """
    if comparison.steps_are == "profiled":
        rows = [(PARTS[row.id][0].lower(), row.change_ms) for row in comparison.budget]
        return _largest_words(rows, comparison.a_ms)
    moved = [
        (row.id, row.change_ms) for row in comparison.phases if not row.low_ms <= 0 <= row.high_ms
    ]
    told = _largest_words(moved, comparison.a_ms)
    if not told and comparison.phases:
        return "no phase of the loop moved beyond chance by itself"
    return told


def _largest_words(rows: Iterable[tuple[str, float]], step_ms: float) -> str:
    worth = [row for row in rows if abs(row[1]) >= _WORTH_TELLING * step_ms]
    worth.sort(key=lambda row: -abs(row[1]))
    return ", ".join(f"{name} {ms:+.2f} ms" for name, ms in worth[:_TOLD_PARTS])


def _next(comparison: Comparison) -> str:
    if comparison.steps_are == "profiled":
        return "capture both with stepscope run: steps without the profiler decide"
    from stepscope.verify.workload import SHAPES

    once = comparison.runs == 1
    if any(row.name == SHAPES for row in comparison.config):
        return "a step of B is other work than one of A (see shapes): compare samples a second"
    if comparison.verdict == "no difference seen":
        more = "more starts (stepscope ab --pairs N)" if once else "more pairs or longer runs"
        return f"keep whichever is simpler; to see smaller changes: {more}"
    if comparison.verdict == "slower":
        if comparison.steps_are == "listed":
            return "go back to A, or capture both with stepscope run: it tells what grew"
        return "go back to A, or see what grew: stepscope explain on B's run folder"
    return (
        "make sure with several starts: stepscope ab -- COMMAND_A --- COMMAND_B"
        if once
        else "keep B"
    )


def _side_words(side: Side) -> str:
    steps = sum(run.steps for run in side.runs)
    runs = f" in {len(side.runs)} runs" if len(side.runs) > 1 else ""
    worth = sum(run.effective_steps for run in side.runs)
    alike = (
        f" (as informative as {worth:.0f} independent ones)"
        if len(side.runs) == 1 and worth < 0.8 * steps
        else ""
    )
    return f"{counted(steps, 'step')}{alike}{runs}"
