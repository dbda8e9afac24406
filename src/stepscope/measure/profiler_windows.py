"""The profiler windows of one rank: when one opens and closes, and why one does not.

A script's own profiler comes first: no window opens next to it, and an open one is given up.
"""

from __future__ import annotations

import functools
import weakref
from time import perf_counter
from typing import TYPE_CHECKING, Any

from stepscope.measure.kept_windows import KeptWindows
from stepscope.measure.never_raise import note
from stepscope.measure.schedule import regular_distance
from stepscope.measure.window import Window
from stepscope.records.figures import duration

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stepscope.measure.schedule import PlannedWindow
    from stepscope.measure.settings import Settings

# Saving what one step recorded takes a tenth of this with ten thousand operators.
_DEAR_S = 1.0
OTHER_THREADS = "several threads train: steps are those of the first, and the profiler stays off"


class ProfilerWindows:
    """At most one window runs at a time; the saved ones wait for their files."""

    def __init__(self, settings: Settings) -> None:
        self.running: Window | None = None
        self.ever_started = False
        self._settings = settings
        self._saved: list[Window] = []
        self._longest = 1  # active steps of a saved window
        self._dear = (
            False  # the first recorded step took so long to save that it stays the only one
        )
        self._kept: KeptWindows | None = None
        self._script_profilers: weakref.WeakSet[Any] = weakref.WeakSet()

    def open(self, planned: PlannedWindow, folder: Path, *, one_thread_trains: bool) -> bool:
        """Whether it runs now."""
        if self.running is not None:
            self.finish(self.running)
        if self._dear and planned.is_plain:
            return False
        problem = self._why_not(one_thread_trains=one_thread_trains)
        if problem:
            note("window", problem)
            return False
        then = self._after_saving(planned, folder)
        window = Window(self._settings, planned, folder, after=self._saved[-1:], then=then)
        self.ever_started = True
        self.running = window
        try:
            window.start()
        except Exception:
            self.running = None
            raise
        return True

    def _why_not(self, *, one_thread_trains: bool) -> str | None:
        import torch

        if self.running is not None:
            return "no further window was opened: collectives of the last one are still running"
        if not one_thread_trains:
            return OTHER_THREADS
        if self._script_profilers or torch.autograd._profiler_enabled():
            return "no window was opened: the script's own profiler is running"
        return None

    def finish(self, window: Window) -> None:
        """Save its trace, or keep it running while its last collectives are under way."""
        self.running = None
        began = perf_counter()
        saved = window.finish()
        took_s = perf_counter() - began
        if saved:
            self._keep(window)
        else:
            self.running = window
        if window.planned.is_early and took_s > _DEAR_S:
            self._dear = True
            note(
                "window",
                f"saving one recorded step took {duration(1e9 * took_s)}: it has very many "
                "operators, so no other step was recorded (--wait 10 records three)",
            )

    def _keep(self, window: Window) -> None:
        """Until its file is written; a long run has many windows."""
        window.let_go()
        self._longest = max(self._longest, window.planned.active)
        self._saved = [*filter(lambda saved: saved.file.is_busy, self._saved), window]

    def _after_saving(self, planned: PlannedWindow, folder: Path) -> Callable[[], object]:
        if not planned.regular:
            return lambda: None
        self._kept = self._kept or KeptWindows(folder, regular_distance(self._settings))
        return functools.partial(self._kept.saved, planned)

    def content(self) -> dict[str, Any] | None:
        """Of the windows of `--every`, for rank.json; None without them."""
        return self._kept.content() if self._kept is not None else None

    def step_begins(self, step: int) -> bool:
        """Whether the open window records this step."""
        window = self.running
        if window is None:
            return False
        if window.over:
            # Ask ever more rarely: 1, 2, 4, 8... steps after the last one.
            late = step - window.last - 1
            if late & (late - 1) == 0:
                self.finish(window)
            return False
        window.step()
        return True

    def script_profiler_begins(self, profiler: Any) -> None:
        window = self.running
        if window is not None and window.owns(profiler):
            return
        self._script_profilers.add(profiler)
        if window is not None:
            self.running = None
            note("window", "the window was dropped: the script used the profiler itself")
            window.abandon()

    def script_profiler_ends(self, profiler: Any) -> None:
        self._script_profilers.discard(profiler)

    def close(self, steps: int) -> None:
        """The script ends after this many steps: wait for the files."""
        if self.running is not None:
            self._stop(self.running, steps)
        for window in self._saved:
            window.close()

    def _stop(self, window: Window, steps: int) -> None:
        """The script ends inside the window: keep what was recorded, unless there is better."""
        self.running = None
        recorded = steps - window.planned.first_active
        if not window.over:
            note("window", f"the script ended inside the window, after step {steps - 1}")
        if recorded < self._longest and not window.over:
            window.abandon()
        else:
            window.stop()
            self._keep(window)
