"""How long one operator takes, forward and backward: repeated until the median is known well."""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median, quantiles
from typing import Any

import torch

from stepscope.measure.machine import free_host_bytes
from stepscope.measure.memory.storages import tensors_in
from stepscope.measure.probe.arguments import (
    CannotRebuildError,
    Recorded,
    build_arguments,
    find_operator,
    input_bytes,
    name_of,
)
from stepscope.records.change_values import precision_of, tries_algorithms
from stepscope.records.normal import NORMAL_95

Prepare = Callable[[], Any]
Call = Callable[[Any], Any]

_FEWEST, _MOST = 5, 200  # repeats
_NARROW = 0.01  # of the median: half of its interval, good enough
_SLOW_NS = 1e9  # a call that takes longer is timed twice: its first time may hold a library's start
_SLOWEST_NS = 1e10  # a call that takes longer is timed once
_FEW_SPREAD = 0.25  # of fewer repeats
_HOST_REPEATS = 16
_MEMORY_FACTOR = 6  # of the inputs: outputs, gradients and what backward keeps
_OF_OPTIMIZERS = ("aten::_foreach_", "aten::_fused_")
_OLD = {"weight", "bias", "running_mean", "running_var"}
_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ProbedCall:
    """One call on a device: what it returns, and how long it takes."""

    def __init__(self, request: dict[str, Any], device: torch.device) -> None:
        self._recorded = Recorded(request)
        self._mode: str = request.get("mode", "")
        self._device = device
        needed = _MEMORY_FACTOR * input_bytes(self._recorded)
        free = free_bytes(device)
        if needed > free:
            raise CannotRebuildError(f"it may need {needed >> 20} MiB, {free >> 20} MiB are free")
        self._operator = find_operator(self._recorded)
        self._positional, self._keywords = build_arguments(self._operator, self._recorded, device)

    def describe(self) -> dict[str, Any]:
        """Shape, dtype and need of a gradient of each tensor that it returns."""
        with math_mode(self._mode):
            outputs = list(tensors_in(self._forward(self._prepared())))
        return {
            "outputs": [[list(out.shape), name_of(out.dtype), out.requires_grad] for out in outputs]
        }

    @classmethod
    def describe_cheaply(cls, request: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """On a CPU with tensors that hold no values, as far as the operator allows: a slow one
        would use up the budget before anything is timed."""
        if device.type == "cpu":
            with contextlib.suppress(Exception), _without_values():
                return cls(request, device).describe()
        return cls(request, device).describe()

    def measure(self, seconds: float, *, backward: bool = True) -> dict[str, Any]:
        """Medians in nanoseconds, and half of their relative 95% interval; `backward`: of both
        passes."""
        with math_mode(self._mode):
            share = 1 / 3 if backward else 1.0
            times = self._repeat(self._prepared, self._forward, self._fresh(), seconds * share)
            answer: dict[str, Any] = {"forward": times, "backward": None}
            passes = self._backward_pass() if backward else None
            if passes is not None:
                call, gradients = passes
                left = seconds * (1 - share)
                answer["backward"] = self._repeat(lambda: None, call, gradients, left)
            return answer

    def measure_host(self) -> dict[str, Any]:
        """What the host needs to launch the call, both passes: the device waits for nothing."""
        with math_mode(self._mode):
            host_ns = _host_ns(self._prepared, self._forward)
            passes = self._backward_pass()
            if passes is not None:
                host_ns += _host_ns(lambda: None, passes[0])
            return {"host_ns": host_ns}

    def _backward_pass(self) -> tuple[Callable[[Any], Any], list[torch.Tensor]] | None:
        """A call that runs it, and the gradients that it begins with; None if there is none."""
        returned = self._forward(self._prepared())
        outputs = [out for out in tensors_in(returned) if out.requires_grad]
        everything = [*self._positional, *self._keywords.values()]
        inputs = [tensor for tensor in tensors_in(everything) if tensor.requires_grad]
        if not outputs or not inputs:
            return None
        gradients = [torch.randn_like(out) for out in outputs]

        def backward(_: Any) -> Any:
            return torch.autograd.grad(
                outputs, inputs, gradients, retain_graph=True, allow_unused=True
            )

        return backward, gradients

    def _fresh(self) -> list[torch.Tensor]:
        """Inputs that the step has just computed; its weights and optimizer states are older."""
        if self._recorded.name.startswith(_OF_OPTIMIZERS):
            return []
        named = zip(self._operator._schema.arguments, self._positional, strict=False)
        values = [value for argument, value in named if argument.name not in _OLD]
        return [
            tensor
            for tensor in tensors_in(values)
            if tensor.is_floating_point()
            and all(
                step for side, step in zip(tensor.shape, tensor.stride(), strict=True) if side > 1
            )
        ]

    def _prepared(self) -> list[Any]:
        """An operator that writes into its input gets a copy: a leaf cannot be written into, and on
        a CPU values that shrink with every repeat become slow."""
        if not self._recorded.is_in_place or not self._positional:
            return self._positional
        first, *others = self._positional
        if isinstance(first, torch.Tensor):
            return [first.clone(), *others]
        if isinstance(first, list) and self._device.type == "cpu":
            return [[tensor.clone() for tensor in first], *others]
        return self._positional

    def _forward(self, positional: list[Any]) -> Any:
        dtype = _HALF_DTYPES.get(precision_of(self._mode))
        # Each weight is cast once in a step, so the cast belongs to every call.
        with torch.autocast(
            self._device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False
        ):
            return self._operator(*positional, **self._keywords)

    def _repeat(
        self,
        prepare: Callable[[], Any],
        call: Callable[[Any], Any],
        fresh: list[torch.Tensor],
        seconds: float,
    ) -> dict[str, Any]:
        stopwatch = find_stopwatch(self._device)
        ends = time.monotonic() + seconds
        first_ns = self._first_ns(prepare, call)
        if first_ns >= _SLOW_NS:
            again_ns = self._first_ns(prepare, call) if first_ns < _SLOWEST_NS else first_ns
            return {"ns": min(first_ns, again_ns), "spread": _FEW_SPREAD, "repeats": 1}
        times: list[float] = []  # the first call only warmed up
        while not times or (
            len(times) < _MOST
            and not (len(times) >= _FEWEST and half_interval(times) < _NARROW)
            and time.monotonic() < ends
        ):
            times += stopwatch.take(prepare, call, fresh)
        return {"ns": median(times), "spread": half_interval(times), "repeats": len(times)}

    def _first_ns(self, prepare: Callable[[], Any], call: Callable[[Any], Any]) -> float:
        """Until the device is done: libraries choose their algorithms now."""
        prepared = prepare()
        began = time.perf_counter_ns()
        call(prepared)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return float(time.perf_counter_ns() - began)


def half_interval(times: list[float]) -> float:
    """Half of the median's 95% interval, over the median."""
    if len(times) < _FEWEST:
        return _FEW_SPREAD
    low, middle, high = quantiles(times, n=4, method="inclusive")
    # Of a normal distribution: the median's error is 1.25, the quartiles' distance 1.35 deviations.
    return NORMAL_95 * 1.25 / 1.35 * (high - low) / math.sqrt(len(times)) / max(middle, 1.0)


def _host_ns(prepare: Callable[[], Any], call: Callable[[Any], Any]) -> float:
    """Median of a few calls in a row, fewer than fill the device's queue. Between waits for the
    device the host would be cold, and colder the longer the call takes there."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    times = []
    for _ in range(_HOST_REPEATS):
        prepared = prepare()
        began = time.perf_counter_ns()
        result = call(prepared)
        times.append(float(time.perf_counter_ns() - began))
        del result
    return median(times[1:])


def _without_values() -> contextlib.AbstractContextManager[Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: contextlib.AbstractContextManager[Any] = FakeTensorMode()
    return mode


def warm_up(device: torch.device) -> None:
    """Start what the first call of a process starts: libraries and autograd's threads."""
    if device.type == "cpu":
        with _without_values():
            torch.nn.functional.linear(torch.rand(2, 2), torch.rand(2, 2))
    weight = torch.rand(32, 32, device=device, requires_grad=True)
    for _ in range(2):
        output = torch.nn.functional.linear(weight.detach(), weight)
        torch.autograd.grad([output], [weight], [torch.rand_like(output)])


def free_bytes(device: torch.device) -> int:
    """Memory that a call may use without harming anybody else."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + kept)
    return free_host_bytes()


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
