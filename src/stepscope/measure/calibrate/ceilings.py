"""Measure this machine's ceilings (matmul rates, copy rates, the cost of a launch), with the
stopwatch of all calibration: the host's clock on a CPU, events on the stream on an
accelerator.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from statistics import median, quantiles
from typing import Any

import torch

from stepscope.measure.machine import counters, growth
from stepscope.records.processors import quota_cores, usable_cores

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
# The first side is small: some CPUs emulate 16-bit floats, a thousand times slower than fp32.
_SIDES = {"cuda": (2048, 4096, 8192), "cpu": (64, 256, 512, 1024, 2048)}
_QUICK_SIDES = {"cuda": (4096,), "cpu": (64, 256, 512)}
_SAMPLE_NS = {"cuda": 12_000_000, "cpu": 3_000_000}
_REST_S = {"cuda": 0.04, "cpu": 0.0}  # a ceiling is what a device does before it gets too hot
# A board short of watts lowers its clocks within a tenth of a second of products.
_SUSTAINED_NS, _SUSTAINED_SAMPLE_NS = 700_000_000, 25_000_000
_LONGEST_CALL_NS = {False: 150_000_000, True: 15_000_000}  # by quick
_DEVICE_COPY_BYTES = {"cuda": 512 << 20, "cpu": 128 << 20}
_PINNED_BYTES = 256 << 20
# Measure again while other processes keep this share of the cores busy.
DISTURBED = 0.15
_ROUNDS = {False: 3, True: 2}
_PAUSE_S = {False: 2.0, True: 0.2}
_LAUNCHES = 500  # below what a stream queues before the host has to wait
_QUEUE_CYCLES = 20_000_000  # keeps the device busy while the launches are queued


def measure_ceilings(device: torch.device, *, quick: bool = False) -> dict[str, Any]:
    """Every ceiling with its spread; what this device does not offer is listed with the reason.

    Other processes make a CPU look slower than it is: while they keep cores busy, everything is
    measured again, and the best round counts.
    """
    ceilings = _measure_once(device, quick)
    rounds = 1
    while rounds < _ROUNDS[quick] and _is_disturbed(ceilings):
        time.sleep(_PAUSE_S[quick])
        ceilings = best_of(ceilings, _measure_once(device, quick))
        rounds += 1
    return {**ceilings, "rounds": rounds}


def _measure_once(device: torch.device, quick: bool) -> dict[str, Any]:
    before = counters() if device.type == "cpu" else None
    with _all_cores(device) as threads:
        matmul, refused = _matmuls(device, quick)
        # Bytes read plus bytes written, per second.
        size = _DEVICE_COPY_BYTES[device.type] // (4 if quick else 1)
        source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
        target = torch.empty_like(source).fill_(0)
        times = samples_ns(lambda: target.copy_(source), device)
        # What the host pays for one operator on one element.
        one = torch.ones(1, device=device)
        ceilings: dict[str, Any] = {
            "threads": threads,
            "matmul_flops": matmul,
            "not_offered": refused,
            "copy_bytes_s": (
                _rate(2 * size, times) | {"value": 2 * size / _time_of(times, device) * 1e9}
            ),
            "tiny_op_ns": _cost(_host_ns_per_call(lambda: one.add_(1), device)),
        }
        if device.type == "cuda":
            ceilings |= _transfers(device, quick)

            # Empty kernels back to back: the host's cost of a launch, and the time from start to
            # start on the device when all are queued beforehand.
            def empty() -> None:
                torch.cuda._sleep(0)

            def queued() -> None:
                for _ in range(_LAUNCHES):
                    empty()

            gaps = []
            for _ in range(9):
                torch.cuda._sleep(_QUEUE_CYCLES)
                gaps.append(time_call_ns(queued, device) / _LAUNCHES)
            ceilings |= {
                "launch_ns": _cost(_host_ns_per_call(empty, device)),
                "launch_gap_ns": _cost(gaps),
            }
    return ceilings | (_load_since(before) if before else {})


def _load_since(before: dict[str, Any]) -> dict[str, Any]:
    """Cores that other processes kept busy meanwhile; None if the system does not say."""
    spent = growth(before, counters())
    busy, job = spent["busy_ns"], spent["job_ns"]
    others = None
    if busy is not None and job is not None and spent["wall_ns"]:
        others = max(0, busy + (spent["stolen_ns"] or 0) - job) / spent["wall_ns"]
    return {"other_cores": others, "cores": quota_cores() or usable_cores()}


def _is_disturbed(ceilings: dict[str, Any]) -> bool:
    others, cores = ceilings.get("other_cores"), ceilings.get("cores")
    return others is not None and cores is not None and others >= DISTURBED * cores


def best_of(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The better figure of each ceiling from two rounds, and the load of the quieter one."""
    flops, value = itemgetter("flops"), itemgetter("value")
    loads = [ceilings.get("other_cores") for ceilings in (one, other)]
    return {
        **one,
        "matmul_flops": {
            dtype: max((ceilings["matmul_flops"][dtype] for ceilings in (one, other)), key=flops)
            for dtype in one["matmul_flops"]
            if dtype in other["matmul_flops"]
        },
        "copy_bytes_s": max((one["copy_bytes_s"], other["copy_bytes_s"]), key=value),
        "tiny_op_ns": min((one["tiny_op_ns"], other["tiny_op_ns"]), key=value),
        "other_cores": min((load for load in loads if load is not None), default=None),
    }


@contextlib.contextmanager
def _all_cores(device: torch.device) -> Iterator[int]:
    """Launchers give every rank one thread; a machine's ceiling needs all its cores."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        with contextlib.suppress(AttributeError):  # only Linux knows a process's cores
            torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _matmuls(device: torch.device, quick: bool) -> tuple[dict[str, Any], dict[str, str]]:
    best: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name in _dtypes_of(device, quick):
        try:
            best[name] = _best_matmul(name, device, quick)
        except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError) as error:
            refused[name] = str(error).strip().split("\n")[0][:200] or type(error).__name__
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return best, refused


def _dtypes_of(device: torch.device, quick: bool) -> list[str]:
    if device.type == "cuda":
        return ["fp32", "tf32", "fp16", "bf16", "fp8"] + ([] if quick else ["fp64"])
    return ["fp32", "fp16", "bf16"] + ([] if quick else ["fp64"])


def _best_matmul(name: str, device: torch.device, quick: bool) -> dict[str, float]:
    """The best of several sizes: {"flops": per second, "spread": .., "side": ..}, and on a GPU what
    is left of it without rests."""
    best: dict[str, float] = {}
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        longest_side = float("inf")
        for side in (_QUICK_SIDES if quick else _SIDES)[device.type]:
            if side > longest_side:
                break
            call = _matmul_call(name, side, device)
            call()
            times = samples_ns(
                call,
                device,
                samples=5 if quick else 9,
                sample_ns=_SAMPLE_NS[device.type],
                rest_s=_REST_S[device.type],
            )
            longest_side = side * (_LONGEST_CALL_NS[quick] / median(times)) ** (1 / 3)
            flops = 2 * side**3 / _time_of(times, device) * 1e9
            if flops > best.get("flops", 0):
                best = {"flops": flops, "spread": spread(times), "side": side}
        if device.type == "cuda" and not quick:
            best["sustained"] = _sustained_flops(name, int(best["side"]), best["flops"], device)
    finally:
        torch.set_float32_matmul_precision(before)
    return best


def _sustained_flops(name: str, side: int, flops: float, device: torch.device) -> float:
    """Products without a rest, the last third of them."""
    call_ns = 2 * side**3 / flops * 1e9
    samples = 3 + int(_SUSTAINED_NS // max(call_ns, _SUSTAINED_SAMPLE_NS))
    call = _matmul_call(name, side, device)
    times = samples_ns(call, device, samples=samples, sample_ns=_SUSTAINED_SAMPLE_NS)
    return 2 * side**3 / median(times[-max(1, samples // 3) :]) * 1e9


def _time_of(times: list[float], device: torch.device) -> float:
    """The median on a GPU, which slows down as it warms; the best on a CPU, which is disturbed."""
    return min(times) if device.type == "cpu" else median(times)


def _matmul_call(name: str, side: int, device: torch.device) -> Callable[[], Any]:
    """Random values: matrices of zeros draw less power and run faster than real ones."""
    if name == "fp8":
        return _fp8_call(side, device)
    dtype = _DTYPES[name]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty(side, side, device=device, dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def _fp8_call(side: int, device: torch.device) -> Callable[[], Any]:
    a, b = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    columns = b.t()  # the second matrix has to lie by columns
    return lambda: torch._scaled_mm(
        a, columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _transfers(device: torch.device, quick: bool) -> dict[str, Any]:
    """Between pinned host memory and the device, bytes once."""
    size = _PINNED_BYTES // (4 if quick else 1)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(1)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    down = samples_ns(lambda: there.copy_(host, non_blocking=True), device)
    back = samples_ns(lambda: host.copy_(there, non_blocking=True), device)
    return {
        "host_to_device_bytes_s": _rate(size, down),
        "device_to_host_bytes_s": _rate(size, back),
    }


def _rate(size: int, times_ns: list[float]) -> dict[str, float]:
    return {"value": size / median(times_ns) * 1e9, "spread": spread(times_ns)}


def _host_ns_per_call(call: Callable[[], Any], device: torch.device) -> list[float]:
    times = []
    for _ in range(10):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter_ns()
        for _ in range(_LAUNCHES):
            call()
        times.append((time.perf_counter_ns() - began) / _LAUNCHES)
    return times[1:]


def _cost(times_ns: list[float]) -> dict[str, float]:
    return {"value": median(times_ns), "spread": spread(times_ns)}


# How long a call takes: the host's clock on a CPU, events on the stream on an accelerator.

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
