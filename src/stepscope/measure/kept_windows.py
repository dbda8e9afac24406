"""The traces of `--every`: bounded in number and bytes however long the run is.

The newest one always stays. Of the others every second, fourth, eighth... one stays, so that those
left are spread evenly over the run. Which ones follows from the step number and the size of a
trace: ranks of one job keep the same ones.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from stepscope.measure import folder as layout

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.measure.schedule import PlannedWindow

MOST_WINDOWS = 16
MOST_BYTES = 16 << 20  # of their traces; two stay, however large they are


def to_keep(newest: int, most: int) -> set[int]:
    """Which of the windows 1 to `newest` stay, at most `most` of them."""
    apart = 1
    while newest // apart > most - 1:
        apart *= 2
    return {*range(apart, newest + 1, apart), newest}


class KeptWindows:
    """Called by threads that compress traces, one window after another."""

    def __init__(self, folder: Path, every: int) -> None:
        self._folder, self._every = folder, every
        self._lock = threading.Lock()
        self._kept: dict[int, PlannedWindow] = {}
        self._recorded = 0
        self._largest = 1

    def saved(self, window: PlannedWindow) -> None:
        """Its trace is on disk: remove those that need not stay."""
        with self._lock:
            newest = window.first // self._every
            self._recorded += 1
            self._kept[newest] = window
            self._largest = max(self._largest, _size(self._folder / window.file))
            most = max(2, min(MOST_WINDOWS, MOST_BYTES // self._largest))
            for number in self._kept.keys() - to_keep(newest, most):
                dropped = self._kept.pop(number)
                layout.remove(self._folder / dropped.file)
                layout.remove(self._folder / dropped.comms_file)

    def content(self) -> dict[str, Any]:
        """For rank.json."""
        with self._lock:
            return {
                "every": self._every,
                "recorded": self._recorded,
                "dropped": self._recorded - len(self._kept),
                "kept": [window.first_active for window in self._kept.values()],
            }


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
