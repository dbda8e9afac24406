"""How busy the machine was during steps without the profiler, for the findings about threads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.explain.cpu_use import CpuUse
    from stepscope.records.host_load import HostLoad, PlainSteps

DISTURBED = 0.10  # of the step without a core
MANY_TAKEN = 0.10  # of the cores, by others: every time is measured beside them
HELPERS = 0.3  # of the training thread's wait: below this, operators run on that thread only
_ALONE = 1.1  # cores that a single-threaded process keeps busy, with its helper threads
LEAST_WALL_NS = 100_000_000  # the system counts in hundredths of a second


def looked(use: CpuUse | None) -> tuple[HostLoad | None, PlainSteps | None]:
    """The load, and its counters if they cover enough time."""
    load = use.load if use else None
    plain = load.plain if load else None
    if plain is not None and (plain.wall_ns < LEAST_WALL_NS or plain.steps < 1):
        plain = None
    return load, plain


def lost_to_others(plain: PlainSteps) -> float:
    """Cores that other processes and other virtual machines kept busy."""
    return (plain.other_cores or 0.0) + plain.stolen_cores


def taken_by_others(load: HostLoad) -> float:
    """The share of the cores that others kept busy. A quota limits the job alone: others are
    compared with the cores that the job may run on."""
    cores = load.cores or load.room
    if not cores or load.plain is None or load.plain.wall_ns < LEAST_WALL_NS:
        return 0.0
    return lost_to_others(load.plain) / cores


def is_beside_others(use: CpuUse | None) -> bool:
    """Whether other programs took so many cores that every time of the step is doubtful."""
    return use is not None and use.load is not None and taken_by_others(use.load) >= MANY_TAKEN


def free_threads(load: HostLoad) -> int:
    """Threads per rank so that each has a core; at least one."""
    room = load.room or 1.0
    others = lost_to_others(load.plain) if load.plain and load.plain.wall_ns else 0.0
    free = min(room, (load.cores or room) - others)
    # A core that is half free deserves a thread.
    return max(1, math.floor(free / max(1, load.local_ranks or 1) + 0.5))


def idle_cores(load: HostLoad, plain: PlainSteps) -> float | None:
    """Idle cores that the process may use; None where the system does not report them."""
    if load.room is None or plain.busy_ns is None:
        return None
    return max(0.0, load.room - plain.busy_ns / plain.wall_ns - plain.stolen_cores)


def disturbed(use: CpuUse) -> bool:
    """Whether threads waited for cores, so that operators do not show how fast they can be."""
    _, plain = looked(use)
    return plain is not None and (plain.waiting_share or 0.0) >= DISTURBED


def threads_take_part(load: HostLoad, plain: PlainSteps) -> bool:
    """Whether other threads than the training thread compute, or try to; True if not known."""
    if load.threads < 2:
        return False
    if plain.used_cores is None or plain.used_cores > _ALONE:
        return True
    if plain.waiting_ns is None or plain.training_waiting_ns is None:
        return True
    return plain.waiting_ns - plain.training_waiting_ns >= HELPERS * plain.training_waiting_ns
