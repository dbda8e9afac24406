"""A child forked from a training that was profiled ends without C++ destructors.

Kineto's destructor waits for a thread that only the parent has. A child that ends like any program
(not by os._exit, as multiprocessing's do) would hang there forever; torch 2.13's own profiler alone
causes it too.
"""

from __future__ import annotations

import atexit
import ctypes

from stepscope.measure.never_raise import never_raise


@never_raise
def end_without_destructors() -> None:
    """Call in the child. Python's exit handlers still run, and C's output is still flushed."""
    libc = ctypes.CDLL(None)
    # glibc calls it with the exit code, before everything the parent registered.
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    atexit.register(libc.fflush, None)
