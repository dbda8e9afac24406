"""What the driver counts for this process on its GPU: the truth for peaks and private pools.

NVML names the bytes of each process; where it cannot (in most containers it knows processes by
other numbers), the device's own count is used, which is right for differences while no other
process allocates.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from dataclasses import dataclass
from typing import Any

NVML, WHOLE_DEVICE = "this process by NVML", "the device, others stopped"
_LIBRARY = "libnvidia-ml.so.1"
_MOST_PROCESSES = 256
_NOT_SAID = (1 << 64) - 1


class ProcessMemory(ctypes.Structure):
    """NVML's nvmlProcessInfo_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverCount:
    """Bytes that a training took from the driver beyond what stays when it has given all back:
    the context, loaded kernels and the libraries' own memory."""

    driver_bytes: int
    context_bytes: int | None  # None: only the whole device's count is known
    counted_by: str


def used_by_process(uuid: str, *, library: Any = None) -> int | None:
    """NVML's count for this process on the GPU with this UUID; None where it does not say."""
    try:
        nvml = ctypes.CDLL(_LIBRARY) if library is None else library
        if nvml.nvmlInit_v2():
            return None
        device, count = ctypes.c_void_p(), ctypes.c_uint(_MOST_PROCESSES)
        processes = (ProcessMemory * _MOST_PROCESSES)()
        if nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(device)):
            return None
        if nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), processes):
            return None
    except (OSError, AttributeError):
        return None
    own = [one.used_bytes for one in processes[: count.value] if one.pid == os.getpid()]
    return own[0] if own and own[0] != _NOT_SAID else None


def used_now() -> tuple[int, str]:
    """Bytes in use, and whose count that is."""
    import torch

    torch.cuda.synchronize()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = getattr(properties, "uuid", None)  # since torch 2.5
    own = used_by_process(str(uuid)) if uuid is not None else None
    if own is not None:
        return own, NVML
    free, total = torch.cuda.mem_get_info()
    return total - free, WHOLE_DEVICE


def count_and_release(held_by: dict[str, Any]) -> DriverCount:
    """Drop what `held_by` names and ask the driver before and after. Call it with the device to
    itself. What torch still holds afterwards is part of the training, not of the context."""
    import torch

    before, counted_by = used_now()
    held_by.clear()
    if "torch._dynamo" in sys.modules:  # loading it takes seconds
        torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    after, _ = used_now()
    kept = torch.cuda.memory_reserved()
    return DriverCount(
        driver_bytes=before - after + kept,
        context_bytes=after - kept if counted_by == NVML else None,
        counted_by=counted_by,
    )
