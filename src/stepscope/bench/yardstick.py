"""A workload's step beside a yardstick: fixed work that is timed in turns with it.

A processor that others use too changes its pace within seconds, for the step and for the yardstick
alike: their ratio stays. The yardstick is work of the kinds a training does (products, element by
element, rows picked from a table, many small calls), without autograd, so that capture does not
take it for a step.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WARM_UP = 10  # pairs
FEWEST_PAIRS, MOST_PAIRS = 40, 2000
_LEFT_OUT = 0.05  # of the ratios at each end: pauses hit the step or the yardstick alone
_WIDTH, _PRODUCTS = 256, 9
_TABLE_ROWS, _PICKED = 100_000, 4096
_SMALL_CALLS = 100


class StepOverYardstick(NamedTuple):
    """How many yardsticks a step takes, and computes: the latter by processor time."""

    step: float
    computing: float


class Yardstick:
    """The same work each time, on one processor."""

    def __init__(self) -> None:
        self._matrix = torch.linspace(-1.0, 1.0, _WIDTH * _WIDTH).reshape(_WIDTH, _WIDTH)
        self._table = torch.zeros(_TABLE_ROWS, 64)
        self._picked = torch.arange(_PICKED) * (_TABLE_ROWS // _PICKED)
        self._small = torch.zeros(8)

    def __call__(self) -> None:
        values = self._matrix
        for _ in range(_PRODUCTS):
            values = torch.tanh(values @ self._matrix)
        rows = self._table[self._picked]
        self._table.index_add_(0, self._picked, rows, alpha=0.1)
        for _ in range(_SMALL_CALLS):
            self._small.add_(1.0)


def step_over_yardstick(
    step: Callable[[int], object], yardstick: Callable[[], object], seconds: float
) -> StepOverYardstick:
    """From so many seconds of both in turns."""
    for number in range(WARM_UP):
        step(number)
        yardstick()
    steps: list[tuple[float, float]] = []
    yards = [_seconds(yardstick)]
    end = time.monotonic() + seconds
    while len(steps) < FEWEST_PAIRS or (len(steps) < MOST_PAIRS and time.monotonic() < end):
        steps.append(_seconds(partial(step, WARM_UP + len(steps))))
        yards.append(_seconds(yardstick))
    of_steps, of_yards = (list(zip(*times, strict=True)) for times in (steps, yards))
    return StepOverYardstick(*map(middle_ratio, of_steps, of_yards))


def middle_ratio(steps: Sequence[float], yards: Sequence[float]) -> float:
    """Each step over the yardsticks before and after it (one more than steps): the geometric mean
    without the ends."""
    around = (np.asarray(yards[:-1]) + np.asarray(yards[1:])) / 2
    logs = np.sort(np.log(np.asarray(steps) / around))
    left_out = int(_LEFT_OUT * len(logs))
    return float(np.exp(logs[left_out : len(logs) - left_out].mean()))


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """By the clock, and of this thread on a processor."""
    start, start_thread = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - start, time.thread_time() - start_thread
