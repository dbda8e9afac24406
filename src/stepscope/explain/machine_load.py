"""How full the machine was while plain steps ran: what findings about threads share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.explain.cpu_use import CpuUse
    from stepscope.records.host_load import HostLoad, PlainSteps

DISTURBED = 0.10  # of the step without a core
HELPERS = 0.3  # of the training thread's wait: with less, operators run on that thread alone
_ALONE = 1.1  # cores that one thread and the odds and ends beside it keep busy
LEAST_WALL_NS = 100_000_000  # the system counts in hundredths of a second


def looked(use: CpuUse | None) -> tuple[HostLoad | None, PlainSteps | None]:
    """The load, and its counters where they cover long enough."""
    load = use.load if use else None
    plain = load.plain if load else None
    if plain is not None and (plain.wall_ns < LEAST_WALL_NS or plain.steps < 1):
        plain = None
    return load, plain


def lost_to_others(plain: PlainSteps) -> float:
    """Cores that other processes and other virtual machines kept busy."""
    return (plain.other_cores or 0.0) + plain.stolen_cores


def free_threads(load: HostLoad) -> int:
    """Threads for each rank that all have a core, at least one."""
    room = load.room or 1.0
    others = lost_to_others(load.plain) if load.plain and load.plain.wall_ns else 0.0
    # A core that is half free is worth a thread.
    return max(1, math.floor((room - others) / max(1, load.local_ranks or 1) + 0.5))


def idle_cores(load: HostLoad, plain: PlainSteps) -> float | None:
    """Of those that the process may use; None where the system does not tell."""
    if load.room is None or plain.busy_ns is None:
        return None
    return max(0.0, load.room - plain.busy_ns / plain.wall_ns - plain.stolen_cores)


def disturbed(use: CpuUse) -> bool:
    """While threads wait for cores, no operator shows what it can do."""
    _, plain = looked(use)
    return plain is not None and (plain.waiting_share or 0.0) >= DISTURBED


def threads_take_part(load: HostLoad, plain: PlainSteps) -> bool:
    """Whether threads beside the one that trains compute too, or want to; yes where untold."""
    if load.threads < 2:
        return False
    if plain.used_cores is None or plain.used_cores > _ALONE:
        return True
    if plain.waiting_ns is None or plain.training_waiting_ns is None:
        return True
    return plain.waiting_ns - plain.training_waiting_ns >= HELPERS * plain.training_waiting_ns
