"""How long one operator takes, forward and backward: repeated until the median is known well."""

from __future__ import annotations

import contextlib
import math
import os
import time
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import torch

from stepscope.measure.probe.arguments import (
    CannotRebuildError,
    Recorded,
    build_arguments,
    find_operator,
    input_bytes,
    name_of,
    tensors_in,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FEWEST, _MOST = 5, 200  # repeats
_NARROW = 0.01  # of the median: half of its interval, good enough
_SLOW_NS = 1e9  # a call that takes longer is timed once
_FEW_SPREAD = 0.25  # of fewer repeats
_CYCLES_PER_NS = 2.0  # at most, of any GPU's clock
_MEMORY_FACTOR = 6  # of the inputs: outputs, gradients and what backward keeps
_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ProbedCall:
    """One call on a device: what it returns, and how long it takes."""

    def __init__(self, request: dict[str, Any], device: torch.device) -> None:
        self._recorded = Recorded(request)
        self._mode: str = request.get("mode", "")
        self._device = device
        _check_memory(self._recorded, device)
        self._operator = find_operator(self._recorded)
        self._positional, self._keywords = build_arguments(self._operator, self._recorded, device)

    def describe(self) -> dict[str, Any]:
        """Shape, dtype and need of a gradient of each tensor that it returns."""
        outputs = tensors_in([self._forward(self._prepared())])
        return {
            "outputs": [[list(out.shape), name_of(out.dtype), out.requires_grad] for out in outputs]
        }

    def measure(self, seconds: float) -> dict[str, Any]:
        """Medians in nanoseconds, and half of their relative 95% interval."""
        with _tf32(self._mode):
            # A call may take far longer than what it replaces: one repeat is then enough.
            forward = self._repeat(self._prepared, self._forward, seconds / 3)
            return {"forward": forward, "backward": self._measure_backward(seconds * 2 / 3)}

    def _measure_backward(self, seconds: float) -> dict[str, Any] | None:
        positional = self._prepared()
        outputs = [out for out in tensors_in([self._forward(positional)]) if out.requires_grad]
        everything = [*self._positional, *self._keywords.values()]
        inputs = [tensor for tensor in tensors_in(everything) if tensor.requires_grad]
        if not outputs or not inputs:
            return None
        gradients = [torch.rand_like(out) for out in outputs]

        def backward(_: Any) -> Any:
            return torch.autograd.grad(
                outputs, inputs, gradients, retain_graph=True, allow_unused=True
            )

        return self._repeat(lambda: None, backward, seconds)

    def _prepared(self) -> list[Any]:
        """An operator that writes into its input gets a copy: a leaf cannot be written into."""
        if not self._recorded.is_in_place or not self._positional:
            return self._positional
        first, *others = self._positional
        if isinstance(first, torch.Tensor):
            return [first.clone(), *others]
        if isinstance(first, list):
            return [[tensor.clone() for tensor in first], *others]
        return self._positional

    def _forward(self, positional: list[Any]) -> Any:
        dtype = _HALF_DTYPES.get(self._mode)
        # Each weight is cast once in a step, so the cast belongs to every call.
        with torch.autocast(
            self._device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False
        ):
            return self._operator(*positional, **self._keywords)

    def _repeat(
        self, prepare: Callable[[], Any], call: Callable[[Any], Any], seconds: float
    ) -> dict[str, Any]:
        stopwatch = _stopwatch(self._device)
        ends = time.monotonic() + seconds
        times = [stopwatch(prepare(), call)]
        if times[0] < _SLOW_NS:
            times.clear()  # the first call only warmed up
        while not times or (
            len(times) < _MOST and not _is_known(times) and time.monotonic() < ends
        ):
            times.append(stopwatch(prepare(), call))
        return {"ns": median(times), "spread": half_interval(times), "repeats": len(times)}


def _is_known(times: list[float]) -> bool:
    return len(times) >= _FEWEST and half_interval(times) < _NARROW


def half_interval(times: list[float]) -> float:
    """Half of the median's 95% interval, over the median."""
    if len(times) < _FEWEST:
        return _FEW_SPREAD
    low, middle, high = quantiles(times, n=4, method="inclusive")
    # Of a normal distribution: the median's error is 1.25, the quartiles' distance 1.35 deviations.
    return 1.96 * 1.25 / 1.35 * (high - low) / math.sqrt(len(times)) / max(middle, 1.0)


def _stopwatch(device: torch.device) -> Callable[[Any, Callable[[Any], Any]], float]:
    if device.type != "cuda":
        return _host_ns
    properties = torch.cuda.get_device_properties(device)
    flush = torch.empty(
        max(32 << 20, 2 * getattr(properties, "L2_cache_size", 0)), dtype=torch.int8, device=device
    )
    empty_ns = min(_device_ns(None, lambda _: None, flush) for _ in range(5))

    def stopwatch(prepared: Any, call: Callable[[Any], Any]) -> float:
        return max(1.0, _device_ns(prepared, call, flush) - empty_ns)

    return stopwatch


def _host_ns(prepared: Any, call: Callable[[Any], Any]) -> float:
    began = time.perf_counter_ns()
    result = call(prepared)
    ended = time.perf_counter_ns()
    del result
    return float(ended - began)


def _device_ns(prepared: Any, call: Callable[[Any], Any], flush: torch.Tensor) -> float:
    """Device time with a cold cache. The device sleeps first, so that the host's launches do not
    count."""
    torch.cuda.synchronize()
    began = time.perf_counter_ns()
    call(prepared)
    host_ns = time.perf_counter_ns() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    torch.cuda._sleep(int(_CYCLES_PER_NS * 1.5 * host_ns) + 100_000)
    start.record()
    call(prepared)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end) * 1e6)


@contextlib.contextmanager
def _tf32(mode: str) -> Iterator[None]:
    if mode != "tf32":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def warm_up(device: torch.device) -> None:
    """Start what the first call of a process starts: libraries and autograd's threads."""
    weight = torch.rand(32, 32, device=device, requires_grad=True)
    for _ in range(2):
        output = torch.nn.functional.linear(weight.detach(), weight)
        torch.autograd.grad([output], [weight], [torch.rand_like(output)])


def _check_memory(recorded: Recorded, device: torch.device) -> None:
    needed = _MEMORY_FACTOR * input_bytes(recorded)
    free = free_bytes(device)
    if needed > free:
        raise CannotRebuildError(f"it may need {needed >> 20} MiB, {free >> 20} MiB are free")


def free_bytes(device: torch.device) -> int:
    """Memory that a call may use without harming anybody else."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + kept)
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as lines:  # noqa: PTH123
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
