"""Where a bench was measured: hardware, versions, clocks, and how busy others kept the machine."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import socket
import subprocess
import time
from typing import TYPE_CHECKING

from stepscope.errors import UsageError
from stepscope.measure.machine import counters, growth
from stepscope.records.bench_result import BenchMachine
from stepscope.records.processors import allowed_cores, clock_mhz, processor_name
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.bench.request import BenchRequest

_LOOK_S = 0.3  # the system counts in hundredths of a second
_ASK_S = 5.0
_COUNT_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_GPU_CLOCKS = ("sm", "mem")  # as nvidia-smi names them


def require_torch() -> None:
    """UsageError without it."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            "bench trains with torch, which is not installed in this Python: pip install torch"
        )


def require_gpu(request: BenchRequest) -> None:
    """UsageError for the published shape on a machine without a GPU."""
    if request.size == "paper" and not gpu_count():
        names = " ".join(request.names)
        runs_here = " ".join(("stepscope bench", *filter(None, [names]), "--size tiny"))
        raise UsageError(
            "--size paper is the published size and needs a GPU, but torch finds none",
            f"{runs_here} runs on this machine's {counted(allowed_cores(), 'core')}",
        )


def gpu_count() -> int:
    """CUDA devices that torch can use; this process gets no context on them."""
    import torch

    # NVML counts devices without starting CUDA in this process.
    before = os.environ.get(_COUNT_BY_NVML)
    os.environ[_COUNT_BY_NVML] = "1"
    try:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    finally:
        if before is None:
            del os.environ[_COUNT_BY_NVML]  # the trainings see what the user has set
        else:
            os.environ[_COUNT_BY_NVML] = before


def describe_machine() -> BenchMachine:
    """Before the first run: nothing of ours may be at work."""
    import torch

    return BenchMachine(
        host=socket.gethostname(),
        processor=processor_name(),
        cores=allowed_cores(),
        device=_gpu_name(),
        devices=gpu_count(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        python=platform.python_version(),
        clocks={f"{name}_before": mhz for name, mhz in read_clocks().items()},
        load=busy_cores(),
    )


def busy_cores() -> float | None:
    """The cores that anybody keeps busy while we wait; None where the system does not say."""
    before = counters(several=False)
    time.sleep(_LOOK_S)
    change = growth(before, counters(several=False))
    if change["busy_ns"] is None or not change["wall_ns"]:
        return None
    return float(change["busy_ns"] / change["wall_ns"])


def read_clocks() -> dict[str, float]:
    """MHz by kind: cpu, and of the first GPU sm, mem and their maximum. Not known ones are left
    out."""
    clocks = {}
    if (mhz := clock_mhz()) is not None:
        clocks["cpu"] = mhz
    names = [*_GPU_CLOCKS, *(f"max.{name}" for name in _GPU_CLOCKS)]
    for name, text in zip(names, _ask_gpu([f"clocks.{name}" for name in names]), strict=False):
        with contextlib.suppress(ValueError):
            clocks[name.replace(".", "_")] = float(text)
    return clocks


def _gpu_name() -> str | None:
    return next(iter(_ask_gpu(["name"])), None) if gpu_count() else None


def _ask_gpu(fields: list[str]) -> list[str]:
    """What nvidia-smi says of the first GPU; empty without one."""
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = done.stdout.splitlines()
    return [value.strip() for value in lines[0].split(",")] if lines else []
