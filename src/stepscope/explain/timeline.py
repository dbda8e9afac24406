"""The timeline that adds up: span = compute + exposed_comm + exposed_memory + idle, to the ns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain import intervals
from stepscope.records.explanation import Timeline

if TYPE_CHECKING:
    from stepscope.explain.work import Work


def divide(work: Work, window: tuple[int, int] | None = None) -> Timeline:
    """Divide the span of all work, or a given window of it."""
    low, high = window or work.extent
    sets = [intervals.clip(of, low, high) for of in (work.compute, work.comm, work.memory)]
    _, lengths, (compute, comm, memory) = intervals.sweep(sets)
    computing = int(lengths[compute].sum())
    exposed_comm = int(lengths[comm & ~compute].sum())
    exposed_memory = int(lengths[memory & ~comm & ~compute].sum())
    return Timeline(
        start_ns=low,
        span_ns=high - low,
        compute_ns=computing,
        exposed_comm_ns=exposed_comm,
        exposed_memory_ns=exposed_memory,
        idle_ns=high - low - computing - exposed_comm - exposed_memory,
        comm_ns=intervals.length(sets[1]),
        memory_ns=intervals.length(sets[2]),
        hidden_comm_ns=int(lengths[comm & compute].sum()),
    )
