"""How often each torch function of an array was computed in which way."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

_open: list[Counter[tuple[str, str]]] = []


@contextmanager
def recording(ledger: Counter[tuple[str, str]]) -> Iterator[None]:
    """Meanwhile every function is noted there as (name, "fused" | "vmap" | "one by one" | ...)."""
    _open.append(ledger)
    try:
        yield
    finally:
        _open.pop()


def note(name: str, way: str) -> None:
    if _open:
        _open[-1][name, way] += 1


def answers(ledger: Counter[tuple[str, str]]) -> int:
    """How often code asked for a value in which all models agreed."""
    return sum(times for (_, way), times in ledger.items() if way == "agreed")


def times_by_way(ledger: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """How often each function was computed in each way."""
    ways: dict[str, dict[str, int]] = {}
    for (name, way), times in sorted(ledger.items()):
        ways.setdefault(way, {})[name] = times
    return ways
