"""How many bytes a call needs at most, and how many are free."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch


def meter_on(device: torch.device) -> Callable[[Callable[[], Any]], tuple[Any, int]]:
    """What runs a call there: its result, and the most bytes allocated meanwhile."""
    return meter_on_cuda if device.type == "cuda" else meter_on_host


def meter_on_host(call: Callable[[], Any]) -> tuple[Any, int]:
    """By the profiler's account of the CPU allocator."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        results = call()
    recorded = profiler.profiler.kineto_results.events()
    changes = [event for event in recorded if event.name() == "[memory]"]
    held = highest = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        highest = max(highest, held)
    return results, highest


def meter_on_cuda(call: Callable[[], Any]) -> tuple[Any, int]:
    """By the allocator's own counter."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    return results, torch.cuda.max_memory_allocated() - before


def is_out_of_memory(error: BaseException) -> bool:
    """Of a device or of the host, whose allocator has no error of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def allocatable_bytes(device: torch.device) -> int:
    """What this process can still get: free memory, and what the allocator keeps for later."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + int(kept)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
