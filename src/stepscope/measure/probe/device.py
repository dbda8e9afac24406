"""The device that operators are timed on: its stopwatch, its math modes, its driver's version."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stepscope.records.change_values import precision_of, tries_algorithms

if TYPE_CHECKING:
    Prepare = Callable[[], Any]
    Call = Callable[[Any], Any]

# How long a call keeps its device busy, in caches as a training step leaves them.
#
# On a GPU the profiler's kernel times count, as in a trace, so gaps between launches do not. Where
# the profiler cannot record kernels, events around the call count instead.

_MARK = "spin_kernel"  # the kernel of torch.cuda._sleep
_MARK_CYCLES = 1_000
_SMALLEST_CACHE = 32 << 20
_CYCLES_PER_NS = 2.0  # at most, of any GPU's clock
_DEVICE_ROUND = 8  # repeats that the profiler records at once


class HostStopwatch:
    """For a CPU: the call's own time."""

    def take(self, prepare: Prepare, call: Call, _: Sequence[torch.Tensor]) -> list[float]:
        """One time in nanoseconds."""
        prepared = prepare()
        began = time.perf_counter_ns()
        result = call(prepared)
        ended = time.perf_counter_ns()
        del result
        return [float(ended - began)]


class DeviceStopwatch:
    """For a GPU. Before each repeat its cache is emptied and `fresh` is written: a step leaves
    there what it wrote last."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        size = max(_SMALLEST_CACHE, 2 * getattr(properties, "L2_cache_size", 0))
        self._clean = torch.zeros(size // 4, device=device)
        self._records_kernels = True
        self._empty_ns: float | None = None

    def take(self, prepare: Prepare, call: Call, fresh: Sequence[torch.Tensor]) -> list[float]:
        """Some times in nanoseconds."""
        if self._records_kernels:
            times = self._kernel_times(prepare, call, fresh)
            if times is not None:
                return times
            self._records_kernels = False
        if self._empty_ns is None:
            self._empty_ns = min(self._event_ns(None, lambda _: None, ()) for _ in range(5))
        return [max(1.0, self._event_ns(prepare(), call, fresh) - self._empty_ns)]

    def _kernel_times(
        self, prepare: Prepare, call: Call, fresh: Sequence[torch.Tensor]
    ) -> list[float] | None:
        """None if the profiler does not record this device's kernels."""
        from torch.profiler import ProfilerActivity, profile

        profiler = profile(activities=[ProfilerActivity.CUDA])
        try:
            profiler.start()
        except RuntimeError:
            return None
        try:
            for _ in range(_DEVICE_ROUND):
                prepared = prepare()
                self._set_cache(fresh)
                torch.cuda._sleep(_MARK_CYCLES)
                result = call(prepared)
                torch.cuda._sleep(_MARK_CYCLES)
                del result
            torch.cuda.synchronize()
        finally:
            profiler.stop()
        return split_by_marks(_kernels(profiler), _DEVICE_ROUND)

    def _set_cache(self, fresh: Sequence[torch.Tensor]) -> None:
        self._clean.sum()  # reading leaves nothing that must be written back later
        for tensor in fresh:
            tensor.data.mul_(1)  # .data: autograd must not see a change

    def _event_ns(self, prepared: Any, call: Call, fresh: Sequence[torch.Tensor]) -> float:
        """The device sleeps first, so that the host's launches do not count."""
        torch.cuda.synchronize()
        began = time.perf_counter_ns()
        call(prepared)
        host_ns = time.perf_counter_ns() - began
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._set_cache(fresh)
        torch.cuda._sleep(int(_CYCLES_PER_NS * 1.5 * host_ns) + 100_000)
        start.record()
        call(prepared)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end) * 1e6)


def split_by_marks(kernels: Sequence[tuple[int, int, str]], repeats: int) -> list[float] | None:
    """The kernels' time between each pair of marks; None if some marks are missing. A kernel is
    its start, its duration and its name."""
    times: list[float] = []
    marks = 0
    for _, duration_ns, name in sorted(kernels):
        if _MARK in name:
            marks += 1
            if marks % 2:
                times.append(0.0)
        elif marks % 2:
            times[-1] += duration_ns
    return times if marks == 2 * repeats else None


def _kernels(profiler: Any) -> list[tuple[int, int, str]]:
    events = profiler.profiler.kineto_results.events()
    on_device = [event for event in events if event.device_type() != torch.autograd.DeviceType.CPU]
    return [(event.start_ns(), event.duration_ns(), event.name()) for event in on_device]


def find_stopwatch(device: torch.device) -> HostStopwatch | DeviceStopwatch:
    """The one of this device; its cache buffer is made once."""
    if device.type != "cuda":
        return HostStopwatch()
    if device not in _stopwatches:
        _stopwatches[device] = DeviceStopwatch(device)
    return _stopwatches[device]


_stopwatches: dict[torch.device, DeviceStopwatch] = {}


# torch's switches for products in fp32, as a mode asks for them.

# Whether matrix products and cuDNN's operators may use tf32; other modes have torch's defaults.
_TF32 = {"tf32": (True, True), "fp32": (False, False)}
_DEFAULTS = (False, True)


@contextlib.contextmanager
def math_mode(mode: str) -> Iterator[None]:
    """Set them for a while."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32, cudnn.allow_tf32 = _TF32.get(precision_of(mode), _DEFAULTS)
    cudnn.benchmark = tries_algorithms(mode)
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


# The version of the GPU's driver, as traces have it.


def driver_version(library: str = "libcuda.so.1") -> str:
    """The CUDA version that the driver runs, such as 13000: traces name the driver by it, and torch
    does not always tell it."""
    number = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return "" if failed else str(number.value)
