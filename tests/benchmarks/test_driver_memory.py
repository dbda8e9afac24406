"""What NVML says of this process, read from a library that is made up."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest

from driver_memory import ProcessMemory, used_by_process


def made_up_nvml(*processes: tuple[int, int], fails: str = "") -> Any:
    """A library that knows one GPU and these processes on it, with their bytes."""

    def list_processes(_: Any, count: Any, rows: Any) -> int:
        for place, (process, used) in enumerate(processes):
            rows[place] = ProcessMemory(pid=process, used_bytes=used)
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint)).contents.value = len(processes)
        return int(fails == "processes")

    return SimpleNamespace(
        nvmlInit_v2=lambda: int(fails == "init"),
        nvmlDeviceGetHandleByUUID=lambda uuid, _: int(uuid != b"GPU-abc"),
        nvmlDeviceGetComputeRunningProcesses_v3=list_processes,
    )


def test_only_this_process_counts() -> None:
    nvml = made_up_nvml((1, 700), (os.getpid(), 4200))
    assert used_by_process("abc", library=nvml) == 4200


@pytest.mark.parametrize(
    "nvml",
    [
        made_up_nvml((1, 700)),  # a container's numbers differ from the host's
        made_up_nvml((os.getpid(), (1 << 64) - 1)),  # "not available"
        made_up_nvml((os.getpid(), 4200), fails="init"),
        made_up_nvml((os.getpid(), 4200), fails="processes"),
        object(),  # a library without these functions
    ],
)
def test_what_nvml_cannot_say_is_none(nvml: Any) -> None:
    assert used_by_process("abc", library=nvml) is None


def test_an_unknown_gpu_and_a_missing_library_are_none() -> None:
    assert used_by_process("other", library=made_up_nvml((os.getpid(), 1))) is None
    assert used_by_process("abc") is None
