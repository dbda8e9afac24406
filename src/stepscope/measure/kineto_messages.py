"""Keeps Kineto's messages about our window out of the job's output, and leaves all others in it.

Kineto prints to stderr when a profiler starts and stops. KINETO_LOG_LEVEL would silence the
script's own profilers too, so the level is raised only while ours works.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_LEVEL = "_ZN9libkineto6Logger14severityLevel_E"  # libkineto::Logger::severityLevel_
_NOTHING = 6  # above every level of Kineto's
# Printed at every level when Kineto's first profiler starts outside the main thread.
_OTHER_THREAD = b"External init callback must run in same thread as registerClient"


class KinetoMessages:
    """Silences Kineto inside `unheard`."""

    def __init__(self) -> None:
        self._level = _find_level()
        self._before = 0

    @contextlib.contextmanager
    def unheard(self) -> Iterator[None]:
        """Silences the profiler's warnings too: the script may have turned warnings into errors."""
        self.silence()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            if self._level is not None and self._level.value == _NOTHING:
                self._level.value = self._before

    def silence(self) -> None:
        """Call again after Kineto's start, which sets the level that the environment asks for."""
        if self._level is not None and self._level.value != _NOTHING:
            self._before, self._level.value = self._level.value, _NOTHING


def _find_level() -> Any:
    """Kineto's log level as ctypes sees it, or None in a torch that hides it."""
    try:
        import torch

        library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), _LEVEL)
    except (OSError, ValueError, AttributeError):
        return None


@contextlib.contextmanager
def without_thread_complaint() -> Iterator[None]:
    """Drop Kineto's line about threads from stderr, and nothing else."""
    if threading.current_thread() is threading.main_thread() or not hasattr(os, "memfd_create"):
        yield
        return
    stderr, captured = os.dup(2), os.memfd_create("stepscope-stderr")
    try:
        os.dup2(captured, 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            _pass_on(captured, stderr)
    finally:
        os.close(captured)
        os.close(stderr)


def _pass_on(captured: int, stderr: int) -> None:
    text = os.pread(captured, os.fstat(captured).st_size, 0)
    lines = [line for line in text.splitlines(keepends=True) if _OTHER_THREAD not in line]
    if lines:
        os.write(stderr, b"".join(lines))
