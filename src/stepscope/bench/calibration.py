"""The machine's pace before a run: how long a fixed piece of arithmetic takes.

Saved with every run, so that a later comparison can say whether the machine itself has become
slower. Nothing is corrected by it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS = 15
_CPU_WIDTH, _DEVICE_WIDTH = 192, 2048  # a millisecond or less each
_PRODUCTS = 8


def time_fixed_work(device: torch.device) -> float:
    """Milliseconds that the same matrix products and Python calls take: the median of REPEATS."""
    width = _CPU_WIDTH if device.type == "cpu" else _DEVICE_WIDTH
    values = torch.linspace(-1.0, 1.0, width * width, device=device).reshape(width, width)

    def work() -> None:
        out = values
        for _ in range(_PRODUCTS):
            out = torch.tanh(out @ values)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    milliseconds = [_time_ms(work) for _ in range(3 + REPEATS)][3:]  # the first ones warm up
    _forget_memory(device)
    return float(np.median(milliseconds))


def _time_ms(work: Callable[[], None]) -> float:
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e6


def _forget_memory(device: torch.device) -> None:
    """The workload's own peak counts, not this one's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
