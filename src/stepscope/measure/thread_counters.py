"""What the system counts for the calling thread: time on a core, time without one, and its waits.

One reading takes about 3 us. The training's own threads are counted together.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_SCHEDULER = "/proc/thread-self/schedstat"


class ThreadCounters(NamedTuple):
    """All but `switches` in nanoseconds."""

    wall_ns: int
    computing_ns: int
    queue_ns: int  # ready, but without a core
    process_ns: int  # computing of all threads
    switches: int  # times it gave its core away to wait


def counters_reader() -> Callable[[], ThreadCounters] | None:
    """To be called and used in one thread; None where the system does not count.

    The scheduler counts the time on a core up to its last tick; the clock, up to now.
    """
    try:
        import resource

        thread = resource.RUSAGE_THREAD
        file = os.open(_SCHEDULER, os.O_RDONLY)
    except (ImportError, AttributeError, OSError):
        return None

    def read() -> ThreadCounters:
        return ThreadCounters(
            wall_ns=time.perf_counter_ns(),
            computing_ns=time.thread_time_ns(),
            queue_ns=int(os.pread(file, 96, 0).split()[1]),
            process_ns=time.process_time_ns(),
            switches=resource.getrusage(thread).ru_nvcsw,
        )

    try:
        read()
    except (OSError, ValueError, IndexError):  # a kernel that counts nothing
        return None
    return read
