"""Small training steps as traces, and calibrations with round numbers.

A CPU step, in microseconds: forward 0 to 1000, then three layers of backward of 1000 each with a
weight's gradient right behind, the optimizer from 4000 to 4500.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from explain.build import AUTOGRAD, kernel, nccl, note, op, step, write
from stepscope import read_trace
from stepscope.records.hardware import CollectiveFit, Contention, Profile, Segment
from stepscope.records.rank import MeasuredSteps

if TYPE_CHECKING:
    from pathlib import Path

    from explain.build import Events
    from stepscope.records.trace import Trace

ENGINE = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
LAYERS = 3
MB = 1 << 20


def accumulate(start: float, shape: list[int], dtype: str = "float", thread: int = 100) -> Events:
    """A gradient that is there 20 µs after `start`."""
    return [
        *op(ENGINE + ACCUMULATE, start=start, dur=20, thread=thread),
        *op(
            ACCUMULATE,
            start=start + 2,
            dur=10,
            shapes=[shape],
            dtypes=[dtype],
            thread=thread,
            forward_thread=1,
        ),
    ]


def cpu_step(shape: list[int], *, at: float = 0, micro_batches: int = 1) -> Events:
    out: Events = []
    now = at
    for _ in range(micro_batches):
        out += op("aten::linear", start=now, dur=1000)
        for layer in range(LAYERS):
            begin = now + 1000 + 1000 * layer
            out += op(ENGINE + "AddmmBackward0", start=begin, dur=980, forward_thread=1)
            out += accumulate(begin + 980, shape)
        now += 4000
    out += note("Optimizer.step#SGD.step", start=now, dur=500)
    out += op("aten::add_", start=now, dur=500, shapes=[shape])
    return out


def cpu_trace(folder: Path, shape: list[int], *, steps: int = 1, **how: Any) -> Trace:
    """Steps of 4500 µs (with one micro-batch), one after the other."""
    length = 4000 * how.get("micro_batches", 1) + 500
    events: Events = []
    for number in range(steps):
        events += step(number + 1, start=number * length, dur=length)
        events += cpu_step(shape, at=number * length, **how)
    return read_trace(write(folder / "cpu.json", events, device=None), cache=False)


def gpu_trace(folder: Path, shape: list[int], *, device: str = "NVIDIA H200") -> Trace:
    """The same on a device: kernels of a millisecond, launched 50 µs apart."""
    events: Events = [*step(1, start=0, dur=4600)]
    events += op("aten::linear", start=0, dur=20)
    events += kernel("gemm", start=20, dur=980, launched_at=5)
    for layer in range(LAYERS):
        begin = 50 + 50 * layer
        events += op(
            ENGINE + "AddmmBackward0", start=begin, dur=20, thread=AUTOGRAD, forward_thread=1
        )
        events += kernel(
            "gemm", start=1000 + 1000 * layer, dur=1000, launched_at=begin + 5, thread=AUTOGRAD
        )
        events += accumulate(begin + 22, shape, thread=AUTOGRAD)
    events += note("Optimizer.step#SGD.step", start=300, dur=100)
    events += op("aten::add_", start=310, dur=20, shapes=[shape])
    events += kernel("sgd", start=4000, dur=500, launched_at=315)
    return read_trace(write(folder / "gpu.json", events, device=device), cache=False)


def ddp_trace(folder: Path, *, elements: int, dur: float, ranks: int = 2) -> Trace:
    """A device's step: a millisecond of compute, one all-reduce, half a millisecond of optimizer.
    The host is done after 450 µs."""
    events: Events = [*step(1, start=0, dur=450)]
    events += op("aten::linear", start=0, dur=20)
    events += kernel("gemm", start=20, dur=480, launched_at=5)
    events += kernel("gemm", start=501, dur=499, launched_at=10)
    events += op(ENGINE + ACCUMULATE, start=50, dur=60, thread=AUTOGRAD)
    events += op("c10d::allreduce_", start=60, dur=40, thread=AUTOGRAD, shapes=[[[elements]]])
    told = nccl("allreduce", in_elements=elements, out_elements=elements, group_size=ranks)
    events += kernel(
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        start=1000, dur=dur, stream=20, launched_at=70, thread=AUTOGRAD, **told,
    )  # fmt: skip
    events += note("Optimizer.step#SGD.step", start=300, dur=100)
    events += op("aten::add_", start=310, dur=20)
    events += kernel("sgd", start=1000 + dur, dur=500, launched_at=315)
    path = write(
        folder / "ddp.json", events, device="NVIDIA H200", rank=0, world_size=ranks, groups=[ranks]
    )
    return read_trace(path, cache=False)


def truth(*steps_us: float) -> MeasuredSteps:
    """Steps as measured without the profiler."""
    steps = tuple(round(us * 1000) for us in steps_us)
    middle = sorted(steps)[len(steps) // 2]
    return MeasuredSteps(
        steps=len(steps), steps_ns=steps, step_ns=middle, wall_ns=middle, device_ns=None,
        phases_ns={},
    )  # fmt: skip


def calibration(
    ranks: int = 2,
    *,
    alpha_us: float = 100,
    us_per_mb: float = 1000,
    lost: float | None = None,
    kind: str = "cpu",
    device: str = "cpu",
    backend: str = "gloo",
    collectives: tuple[str, ...] = ("all_reduce",),
) -> Profile:
    """alpha + beta x bytes exactly, nothing scattered. Without `lost` contention is unknown."""
    line = Segment(
        from_bytes=1024,
        to_bytes=1 << 30,
        alpha_ns=alpha_us * 1e3,
        beta_ns_per_byte=us_per_mb * 1e3 / MB,
    )
    fits = tuple(
        CollectiveFit(
            kind=name, group="world", group_size=ranks, segments=(line,), measured=(), passes=8,
            noise=0.0, held_out=0.0, held_out_sizes=0.0,
        )
        for name in collectives
    )  # fmt: skip
    contention = None
    if lost is not None:
        contention = Contention(group_size=ranks, lost=lost, beside=(line,))
    return Profile(
        host="h", device=device, kind=kind, torch="2", when_unix=0.0, world_size=ranks,
        backend=backend, threads=1, matmul_flops={}, fits=fits, contention=contention,
    )  # fmt: skip
