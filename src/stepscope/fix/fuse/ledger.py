"""How often each torch function of an array was computed in which way, and what it cost to compute
model by model."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import mean
from typing import Any

import torch

_LAST_CALLS = 16
_open: list[ArrayLedger] = []


class ArrayLedger:
    """Count how the functions of one array were computed."""

    def __init__(self) -> None:
        self._times: Counter[tuple[str, str]] = Counter()
        self._spent: dict[tuple[str, str], deque[Callable[[], float]]] = {}

    def recording(self) -> AbstractContextManager[None]:
        """Meanwhile `note` and `timed` write here."""
        return innermost(_open, self)

    def add(self, name: str, way: str) -> None:
        self._times[name, way] += 1

    def add_time(self, kind: str, name: str, read_ms: Callable[[], float]) -> None:
        self._spent.setdefault((kind, name), deque(maxlen=_LAST_CALLS)).append(read_ms)

    def answers(self) -> int:
        """How often code asked for a value in which all models agreed."""
        return sum(times for (_, way), times in self._times.items() if way == "agreed")

    def times_by_way(self) -> dict[str, dict[str, int]]:
        """How often each function was computed in each way."""
        ways: dict[str, dict[str, int]] = {}
        for (name, way), times in sorted(self._times.items()):
            ways.setdefault(way, {})[name] = times
        return ways

    def cost_ms(self) -> dict[str, dict[str, float]]:
        """Return the mean forward time of the last calls of each module and function that was
        computed model by model."""
        costs: dict[str, dict[str, float]] = {"modules": {}, "functions": {}}
        for (kind, name), spent in self._spent.items():
            costs[kind][name] = mean(read_ms() for read_ms in spent)
        return costs


def note(name: str, way: str) -> None:
    """A function was computed: "fused", "vmap", "one by one" or the like."""
    if _open:
        _open[-1].add(name, way)


@contextmanager
def innermost(stack: list[Any], value: Any) -> Iterator[None]:
    """Put a value on top of a stack meanwhile: arrays may compute inside of others."""
    stack.append(value)
    try:
        yield
    finally:
        stack.pop()


@contextmanager
def timed(kind: str, name: str, like: torch.Tensor | None) -> Iterator[None]:
    """Note how long it takes, on the device of this tensor; nobody waits for a GPU meanwhile."""
    is_real = type(like) in (torch.Tensor, torch.nn.Parameter)  # else it is being compiled
    if not _open or like is None or not is_real:
        yield
    elif like.device.type != "cuda":
        start = time.perf_counter()
        yield
        spent_ms = 1e3 * (time.perf_counter() - start)
        _open[-1].add_time(kind, name, lambda: spent_ms)
    elif torch.cuda.is_current_stream_capturing():  # a graph's events cannot be read
        yield
    else:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(like.device))
        yield
        end.record(torch.cuda.current_stream(like.device))

        def read_ms() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end))

        _open[-1].add_time(kind, name, read_ms)
