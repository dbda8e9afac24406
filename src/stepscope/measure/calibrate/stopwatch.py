"""How long a call takes: the host's clock on a CPU, events on the stream on an accelerator."""

from __future__ import annotations

import time
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Long enough for the host to queue what is timed, so that launching it is not timed too.
_HEAD_START_CYCLES = 100_000


def time_call_ns(call: Callable[[], Any], device: torch.device) -> int:
    """One call, from its start to the end of everything it started."""
    if device.type == "cpu":
        began = time.perf_counter_ns()
        call()
        return time.perf_counter_ns() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return int(start.elapsed_time(end) * 1e6)


def time_calls_ns(call: Callable[[], Any], count: int, device: torch.device) -> float:
    """Mean of `count` calls one after the other."""

    def several() -> None:
        for _ in range(count):
            call()

    return time_call_ns(several, device) / count


def samples_ns(
    call: Callable[[], Any],
    device: torch.device,
    *,
    samples: int = 9,
    sample_ns: int = 3_000_000,
    rest_s: float = 0.0,
) -> list[float]:
    """Means of several runs of calls, each run long enough for the clock; warmed up before."""
    call()
    once = max(time_call_ns(call, device), 1)
    count = max(1, min(1000, sample_ns // once))
    time_calls_ns(call, count, device)
    means_ns = []
    for _ in range(samples):
        time.sleep(rest_s)
        means_ns.append(time_calls_ns(call, count, device))
    return means_ns


def spread(values: Sequence[float]) -> float:
    """Half of the values lie this far apart, relative to their median."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / median(values)
