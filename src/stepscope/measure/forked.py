"""A child forked from a training that was profiled ends without C++ destructors.

Kineto's destructor waits for a thread that only the parent has: a child that ends like any program
(not by os._exit, as multiprocessing's do) would hang there for good (torch 2.13, with nothing but
torch's own profiler too).
"""

from __future__ import annotations

import atexit
import ctypes

from stepscope.measure.never_raise import never_raise


@never_raise
def end_without_destructors() -> None:
    """In the child. What Python does at exit, and what C has to print, is done all the same."""
    libc = ctypes.CDLL(None)
    # glibc's: called with the exit code, before everything that was registered in the parent.
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    atexit.register(libc.fflush, None)
