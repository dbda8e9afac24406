"""What every answer must satisfy, however damaged the input was."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLOSE = 1e-6
_ROUNDED = 0.005
_SHARE_NAMES = ("share", "overlap", "busy", "fraction")


class UnsoundError(AssertionError):
    """An answer that cannot be right."""


def check_answer(answer: dict[str, Any]) -> None:
    """Sums, shares and numbers of `explain --json`."""
    check_numbers(answer)
    budgets = [answer["budget"], *(rank["budget"] for rank in answer["ranks"])]
    for budget in filter(None, budgets):
        shares = [part["share"] for part in budget["parts"]]
        total = sum(shares)
        _expect(abs(total - 1) < _CLOSE or not any(shares), "shares of a budget", budget)
        if total:
            summed = sum(part["ms"] for part in budget["parts"])
            step = budget["step_ms"]
            _expect(math.isclose(summed, step, rel_tol=_CLOSE, abs_tol=_CLOSE), "a budget", budget)
    for rank in answer["ranks"]:
        _check_rank(rank)
    for finding in answer["findings"]:
        _expect(0 <= finding["share"] <= 1 + _CLOSE, f"share of finding {finding['id']}", finding)


def check_numbers(answer: Any) -> None:
    """No NaN, no infinity, shares within 0 and 1, and no defect that was caught on the way."""
    for place, value in _walk(answer, ""):
        if isinstance(value, float):
            _expect(math.isfinite(value), place, value)
        if isinstance(value, str):
            _expect("a defect in stepscope" not in value, place, value)
        name = place.rsplit(".", 1)[-1]
        is_share = name in _SHARE_NAMES or name.endswith("_share")
        if is_share and isinstance(value, int | float):
            _expect(-_CLOSE <= value <= 1 + _CLOSE, place, value)


def _check_rank(rank: dict[str, Any]) -> None:
    efficiency = rank["efficiency"] or {}
    used = [efficiency.get(name) or 0 for name in ("mfu", "hfu")]
    _expect(min(used) >= 0, "mfu", used)
    said = "The peak must be wrong" in str(rank["quality"])
    _expect(max(used) <= 1 + _ROUNDED or said, "mfu above its peak", used)
    timeline = rank["timeline_ns"]
    if timeline["span"] is None:  # a memory snapshot tells no times
        return
    parts = sum(value for name, value in timeline.items() if name != "span")
    _expect(timeline["span"] == parts, "timeline_ns", timeline)
    _expect(timeline["idle"] == sum(rank["idle_ns"].values()), "idle_ns", rank["idle_ns"])
    host_idle = sum(rank["host_idle_ns"].values())
    _expect(rank["idle_ns"]["host"] == host_idle, "host_idle_ns", rank["host_idle_ns"])
    _expect(min(timeline.values()) >= 0, "a negative time", timeline)


def _walk(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(inner, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _walk(inner, place)
    else:
        yield place, value


def _expect(holds: bool, what: str, value: Any) -> None:
    if not holds:
        raise UnsoundError(f"{what}: {str(value)[:300]}")
