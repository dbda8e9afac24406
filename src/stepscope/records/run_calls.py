"""Collectives over the whole run: of one rank, with its steps, and joined over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Places = NDArray[np.int32]


class LoggedCollectives(msgspec.Struct, frozen=True, kw_only=True):
    """What capture kept of torch's flight recorder, in the order of creation. Stretches of a run
    with many collectives are missing."""

    groups: tuple[str, ...]
    names: tuple[str, ...]  # as torch's profiler calls them, like "gloo:all_reduce"
    group: Places  # index into groups
    name: Places  # index into names
    sequence: Ints  # the group's own count: equal on all its ranks
    created_ns: Ints  # the rank has arrived, by its own wall clock
    duration_ns: Ints | None = None  # on the device, where torch measured it

    def __len__(self) -> int:
        return len(self.sequence)


class RunArrivals(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals at the collectives of the run, joined over ranks. Matrices are (steps, ranks), with
    NaN where a rank took no part."""

    ranks: tuple[int, ...]
    number: Ints  # of the steps, in order
    late_ns: Floats  # arrival after the group's median arrival
    wait_ns: Floats  # until the last rank came
    error_ns: dict[int, float] = {}  # by rank: how far off its waits may be
    together: bool = True  # all ranks meet in the same collectives, not in groups of their own


class RunCalls(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's collectives in undisturbed steps, and what those steps spent in each phase."""

    groups: tuple[str, ...]
    group: Places  # index into groups
    sequence: Ints
    arrival_ns: Ints
    number: Ints  # of the step
    # The rank waits where it calls, so each collective of a step may be late by itself. Without,
    # it goes on, and its lateness grows up to the end of the step.
    blocking: bool
    on_host: bool  # the host waits, so it arrives when its work is done; a device may be behind it
    steps: Ints  # numbers, in order
    step_ns: Ints
    phases_ns: dict[str, Ints]  # of these steps
    cpu_wait_ns: Ints | None = None  # of these steps: ready to run, but no core was free

    def __len__(self) -> int:
        return len(self.sequence)
