"""One rank's capture: counts steps, keeps the truth, opens and closes the profiler window.

A process becomes a rank when it ends its first step. Until then nothing is created, so launchers,
data-loader workers and helpers leave no trace in the run folder.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.measure import folder as layout
from stepscope.measure.harmless import harmless, note, problems
from stepscope.measure.ranks import facts, rank_and_world
from stepscope.measure.sampler import Sampler
from stepscope.measure.steps import DeviceClock, StepClock, with_device_time
from stepscope.measure.window import Window
from stepscope.measure.writer import LineWriter

if TYPE_CHECKING:
    from stepscope.measure.settings import Settings


class Session:
    """Called by hooks at every boundary; costs a few microseconds a step outside the window."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.optimizer_calls = 0
        self.number = 0  # of the running step
        self._clock = StepClock()
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        self._folder: Path | None = None
        self._steps: LineWriter | None = None
        self._device: DeviceClock | None = None
        self._sampler: Sampler | None = None
        self._window: Window | None = None
        self._windows: list[Window] = []
        self._closed = False
        self._skipped = 0
        self._rank = (0, 1)
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.close)

    # what hooks report

    def enter(self, phase: str) -> None:
        if threading.get_ident() == self._thread and not self._closed:
            self._clock.enter(phase)

    def leave(self, phase: str) -> None:
        if threading.get_ident() == self._thread and not self._closed:
            self._clock.leave(phase)

    def sees_optimizer(self, optimizer: Any) -> None:
        del optimizer
        self.optimizer_calls += 1

    @harmless
    def sees_batch(self) -> None:
        if self.settings.step_on == "dataloader" and self.optimizer_calls == 0:
            self.step_ends()

    @harmless
    def step_was_skipped(self) -> None:
        if self.settings.step_on == "optimizer":
            self._skipped += 1
            self.step_ends(skipped=True)

    @harmless
    def step_ends(self, *, skipped: bool = False) -> None:
        """The running step is over: write its times down, act for the next one."""
        if self._closed:
            return
        if self._folder is None and not self._become_rank():
            return
        row: dict[str, Any] = {"step": self.number, **self._clock.finish()}
        row["end_unix_ns"] = time.time_ns()
        row["window"] = self._window is not None
        if skipped:
            row["skipped"] = True
        if self.number == 0:
            row["first"] = True  # its beginning was not seen
        if self._device is not None:
            row["events"] = self._device.mark()
        if self._steps is not None:
            self._steps.put(row)
        self.number += 1
        if self._act():
            self._clock.restart()
            if self._device is not None:
                self._device.restart()

    def group_ends(self) -> None:
        """The process group is about to go."""

    @harmless
    def profiler_wanted(self, other: Any) -> None:
        """The script starts a profiler of its own: ours steps aside."""
        window = self._window
        if window is not None and getattr(window.profiler, "profiler", None) is not other:
            self._window = None
            note("window", "the script used the profiler itself; the window was given up")
            window.abandon()

    # the schedule

    def _act(self) -> bool:
        """Between two steps: what does the step that now begins need? True if that took time."""
        if self._window is not None:
            window = self._window
            if self.number > window.last:
                self._window = None
                self._windows.append(window)
            window.step()
            if self._window is None and self._sampler is not None:
                self._sampler.resume()
            return True
        cycle, place = divmod(self.number, self.settings.cycle)
        due: bool = place == self.settings.wait and cycle < max(1, self.settings.repeat)
        if due:
            self._open_window(cycle)
        return due

    def _open_window(self, cycle: int) -> None:
        import torch

        if torch.autograd._profiler_enabled():
            note("window", "the script's own profiler is running; no window was opened")
            return
        assert self._folder is not None
        if self._sampler is not None:
            self._sampler.pause()
        window = Window(self.settings, self.number, self._folder, repeat=cycle)
        window.start()
        self._window = window

    # beginning and end

    def _become_rank(self) -> bool:
        self._rank = rank_and_world()
        try:
            self._folder = layout.claim_rank_folder(Path(self.settings.folder), self._rank[0])
        except OSError as error:
            self._closed = True  # nowhere to write: stay out of the way for good
            note("run folder", error)
            return False
        self._steps = LineWriter(self._folder / layout.STEPS, with_device_time)
        if self.settings.sample_hz > 0:
            self._sampler = Sampler(self._thread, self.settings.sample_hz)
        self._device = DeviceClock()
        self._describe("running")
        return True

    def _describe(self, status: str) -> None:
        if self._folder is None:
            return
        rank, world = self._rank
        layout.write_json(
            self._folder / layout.RANK,
            {
                "schema": layout.SCHEMA,
                "rank": rank,
                "world_size": world,
                "status": status,
                "steps": self.number,
                "skipped": self._skipped,
                "argv": sys.argv,
                "problems": problems(),
                **facts(),
            },
        )

    @harmless
    def close(self) -> None:
        """At exit, however often it is called."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._window is not None:
            window, self._window = self._window, None
            note("window", f"the script ended at step {self.number}, inside the window")
            window.stop_early()
            self._windows.append(window)
        for window in self._windows:
            window.close()
        if self._steps is not None:
            self._steps.close()
        if self._sampler is not None and self._folder is not None:
            layout.write_json(self._folder / layout.SAMPLES, self._sampler.close())
        self._describe("finished")

    def _forked(self) -> None:
        """A child of the training is not the training."""
        self._closed = True
        self._window = None
