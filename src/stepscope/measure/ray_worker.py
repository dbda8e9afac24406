"""Inside a Ray worker: close the rank when its training ends.

Ray kills its workers, so nothing runs at their exit. Ray Train runs the training in a thread of its
own; when that thread has ended, the process is still there for a moment.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from stepscope.measure.never_raise import never_raise
from stepscope.measure.writer import started_thread

if TYPE_CHECKING:
    from collections.abc import Callable

_PROGRAM = "default_worker.py"
_LONGEST_S = 5.0


class TrainingThread:
    """Made in the thread that trains. Does nothing outside Ray, or in a process's main thread."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._training = threading.current_thread()
        self._closing: threading.Thread | None = None
        if _is_ray_worker() and self._training is not threading.main_thread():
            self._closing = started_thread(lambda: self._close_after(close), "stepscope-end")

    def _close_after(self, close: Callable[[], None]) -> None:
        self._training.join()
        close()

    @never_raise
    def wait_until_closed(self) -> None:
        """The process group is destroyed, and Ray kills the process after that."""
        closing = self._closing
        if closing is not None and not self._training.is_alive():
            closing.join(_LONGEST_S)


def _is_ray_worker() -> bool:
    return any(word.endswith(_PROGRAM) for word in sys.argv[:1])
