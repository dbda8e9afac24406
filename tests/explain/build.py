"""Tiny Kineto traces, written in a test line by line.

Times are microseconds, as in the file; every function gives a list of events. `write` puts them
into a JSON file, so that a test goes the whole way from text to answer:

    write(path, step(1, start=0, dur=100), kernel("gemm", start=10, dur=50, launched_at=2))
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Events = list[Event]

PROCESS = 100
MAIN, AUTOGRAD, WORKER = 100, 101, 102
ZERO_NS = 1_700_000_000_000_000_000  # when a test's time 0 is
_ZERO_US = 1_000_000.0  # the file's times are positive even where a test's are not

_correlations = itertools.count(1)


def kernel(
    name: str,
    *,
    start: float,
    dur: float,
    stream: int = 7,
    launched_at: float | None = None,
    launch: str = "cudaLaunchKernel",
    launch_dur: float = 1,
    thread: int = MAIN,
    correlation: int | None = None,
    category: str = "kernel",
    **args: Any,
) -> Events:
    """A device event and, with `launched_at`, the runtime call that launched it."""
    if correlation is None:
        correlation = next(_correlations)
    args = {"device": 0, "stream": stream, "correlation": correlation, **args}
    out = _event(category, name, start, dur, pid=0, tid=stream, **args)
    if launched_at is not None:
        out += call(
            launch, start=launched_at, dur=launch_dur, thread=thread, correlation=correlation
        )
    return out


def memcpy(name: str = "Memcpy HtoD (Pinned -> Device)", **kwargs: Any) -> Events:
    """A copy; `bytes=` gives its size."""
    return kernel(name, category="gpu_memcpy", launch="cudaMemcpyAsync", **kwargs)


def memset(name: str = "Memset (Device)", **kwargs: Any) -> Events:
    """A memset; `bytes=` gives its size."""
    return kernel(name, category="gpu_memset", launch="cudaMemsetAsync", **kwargs)


def graph(kernels: list[Events], *, launched_at: float, launch_dur: float = 1) -> Events:
    """Kernels that one cudaGraphLaunch launched."""
    correlation = next(_correlations)
    out = call("cudaGraphLaunch", start=launched_at, dur=launch_dur, correlation=correlation)
    for node, events in enumerate(kernels, 1):
        for event in events:
            args = {"correlation": correlation, "graph id": 1, "graph node id": node}
            out.append(event | {"args": event["args"] | args})
    return out


def call(
    name: str, *, start: float, dur: float, thread: int = MAIN, correlation: int | None = None
) -> Events:
    """A CUDA runtime call on the host."""
    args = {"correlation": next(_correlations) if correlation is None else correlation}
    return _event("cuda_runtime", name, start, dur, tid=thread, **args)


def op(
    name: str,
    *,
    start: float,
    dur: float,
    thread: int = MAIN,
    shapes: list[Any] | None = None,
    strides: list[Any] | None = None,
    dtypes: list[str] | None = None,
    concrete: list[str] | None = None,
    sequence: int | None = None,
    forward_thread: int | None = None,
) -> Events:
    """An operator."""
    args = {
        "Input Dims": shapes,
        "Input Strides": strides,
        "Input type": dtypes,
        "Concrete Inputs": concrete,
        "Sequence number": sequence,
        "Fwd thread id": forward_thread,
    }
    given = {key: value for key, value in args.items() if value is not None}
    return _event("cpu_op", name, start, dur, tid=thread, **given)


def note(
    name: str,
    *,
    start: float,
    dur: float,
    thread: int = MAIN,
    shapes: list[Any] | None = None,
    dtypes: list[str] | None = None,
) -> Events:
    """A user annotation, as record_function and gloo make."""
    args = {"Input Dims": shapes, "Input type": dtypes} if shapes is not None else {}
    return _event("user_annotation", name, start, dur, tid=thread, **args)


def step(number: int, *, start: float, dur: float) -> Events:
    """One of the profiler's step marks."""
    return note(f"ProfilerStep#{number}", start=start, dur=dur)


def frame(name: str, *, start: float, dur: float, thread: int = MAIN) -> Events:
    """A Python function: `train.py(12): main`, `nn.Module: Linear_0`."""
    return _event("python_function", name, start, dur, tid=thread)


def overhead(name: str, *, start: float, dur: float) -> Events:
    """A row in which CUPTI accounts for its own and the driver's work."""
    return _event("overhead", name, start, dur, pid=-1, tid=0)


def describing(category: str, name: str, *, start: float, dur: float, stream: int = 7) -> Events:
    """A device row that is not work: cuda_sync, gpu_user_annotation."""
    args = {"device": 0, "stream": stream}
    return _event(category, name, start, dur, pid=0, tid=stream, **args)


def nccl(
    kind: str,
    *,
    in_elements: int,
    out_elements: int,
    dtype: str = "Float",
    group: str = "0",
    group_size: int = 8,
) -> dict[str, Any]:
    """The arguments that NCCL's kernels carry."""
    return {
        "Collective name": kind,
        "In msg nelems": in_elements,
        "Out msg nelems": out_elements,
        "dtype": dtype,
        "Process Group Name": group,
        "Group size": group_size,
    }


def write(
    path: Path,
    *events: Events,
    rank: int | None = None,
    world_size: int | None = None,
    groups: list[int] | None = None,
    device: str | None = "NVIDIA Test",
) -> Path:
    """A Kineto file of these events."""
    trace: dict[str, Any] = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": device}] if device else [],
        "baseTimeNanoseconds": ZERO_NS - round(_ZERO_US * 1000),
    }
    if rank is not None:
        info = {"backend": "nccl", "rank": rank, "world_size": world_size}
        sizes = [{"pg_name": str(i), "pg_size": size} for i, size in enumerate(groups or [])]
        trace["distributedInfo"] = info | ({"pg_config": sizes} if sizes else {})
    trace["traceEvents"] = [event for group in events for event in group]
    path.write_text(json.dumps(trace))
    return path


def _event(
    category: str,
    name: str,
    start: float,
    dur: float,
    *,
    pid: int = PROCESS,
    tid: int = MAIN,
    **args: Any,
) -> Events:
    return [
        {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": round(_ZERO_US + start, 3),
            "dur": dur,
            "args": args,
        }
    ]
