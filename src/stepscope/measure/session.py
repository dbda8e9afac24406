"""One rank's capture: counts steps, keeps the truth, and lets each part act when it is due.

A process becomes a rank when it ends its first step. Until then nothing is created, so launchers,
data-loader workers and helpers leave no trace in the run folder.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.measure import folder as layout
from stepscope.measure.clock import ClockSync
from stepscope.measure.comms import Comms
from stepscope.measure.harmless import harmless, note, problems
from stepscope.measure.memory import MemoryStep
from stepscope.measure.ranges import Ranges
from stepscope.measure.ranks import facts, rank_and_world
from stepscope.measure.sampler import Sampler
from stepscope.measure.schedule import Schedule
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
        self._schedule = Schedule.of(settings)
        self._clock = StepClock()
        self._comms = Comms()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        self._rank = (0, 1)
        self._record: _Record | None = None
        self._window: Window | None = None
        self._windows: list[Window] = []
        self._memory: MemoryStep | None = None
        self._job: dict[str, Any] | None = None
        self._ranges = Ranges() if settings.nvtx else None
        self._forwards = 0
        self._skipped = 0
        self._closed = False
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.close)

    @harmless
    def torch_is_here(self) -> None:
        """Once torch is imported."""
        self._comms.attach()

    # What hooks report. Phases count only in the thread that trains.

    def enter(self, phase: str) -> None:
        if self._closed or threading.get_ident() != self._thread:
            return
        self._clock.enter(phase)
        if self._ranges is not None:
            self._ranges.push(phase)
        if self._memory is not None:
            self._memory_phase(phase, entering=True)

    def leave(self, phase: str) -> None:
        if self._closed or threading.get_ident() != self._thread:
            return
        self._clock.leave(phase)
        if self._ranges is not None:
            self._ranges.pop()
        if self._memory is not None:
            self._memory_phase(phase, entering=False)

    def sees_optimizer(self, optimizer: Any) -> None:
        self.optimizer_calls += 1
        self._optimizers.add(optimizer)

    @harmless
    def sees_batch(self) -> None:
        if self.settings.step_on == "dataloader":
            self.step_ends()

    @harmless
    def outermost_forward_begins(self) -> None:
        """With --step-on forward a step ends where the next forward pass of the model begins."""
        if self.settings.step_on == "forward" and self._forwards:
            self.step_ends()
        self._forwards += 1

    def module_begins(self, module: Any) -> None:
        if self._ranges is not None:
            self._ranges.push(type(module).__name__)

    def module_ends(self, _module: Any) -> None:
        if self._ranges is not None:
            self._ranges.pop()

    @harmless
    def step_was_skipped(self) -> None:
        if self.settings.step_on == "optimizer":
            self._skipped += 1
            self.step_ends(skipped=True)

    @harmless
    def group_ends(self) -> None:
        """The process group is about to go."""
        self._comms.group_ends()

    @harmless
    def profiler_wanted(self, other: Any) -> None:
        """The script starts a profiler of its own: ours steps aside."""
        window = self._window
        if window is not None and getattr(window.profiler, "profiler", None) is not other:
            self._window = None
            note("window", "the script used the profiler itself; the window was given up")
            window.abandon()

    @harmless
    def step_ends(self, *, skipped: bool = False) -> None:
        """The running step is over: write its times down, act for the next one."""
        if self._closed:
            return
        record = self._record or self._become_rank()
        if record is None:
            return
        row: dict[str, Any] = {"step": self.number, **self._clock.finish()}
        row["end_unix_ns"] = time.time_ns()
        row["window"] = self._window is not None
        row["events"] = record.device.mark()
        if skipped:
            row["skipped"] = True
        if self.number == 0:
            row["first"] = True  # its beginning was not seen
        if self._memory is not None:
            row["memory"] = True  # its times are not the training's
            self._end_memory_step(record)
        record.steps.put(row)
        self.number += 1
        if self._act(record):
            self._clock.restart()
            record.device.restart()

    # The schedule: what does the step that now begins need?

    def _act(self, record: _Record) -> bool:
        """True when something of ours took time between the two steps."""
        step = self.number
        opens = self._schedule.opens(step)
        if opens is not None:
            self._open_window(record, opens)
        elif self._schedule.closes(step):
            self._close_window(record)
        elif self._schedule.measures_memory(step):
            self._memory = MemoryStep(list(self._optimizers))
            self._memory.begin()
        elif self._window is not None:
            self._window.step()
            self._comms.step_begins(step)
        else:
            return False
        return True

    def _open_window(self, record: _Record, number: int) -> None:
        import torch

        record.sampler_pauses()
        record.synchronise("start", self.number)  # on every rank, whatever becomes of the window
        if torch.autograd._profiler_enabled():
            note("window", "the script's own profiler is running; no window was opened")
            return
        window = Window(self.settings, self.number, record.folder, repeat=number)
        window.start()
        self._window = window
        self._comms.window_begins(self.number)

    def _close_window(self, record: _Record) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.step()  # behind the last step: the trace is saved
            self._windows.append(window)
            record.collectives(self._comms.window_ends(self.number - 1))
        self._look_at_the_job()
        record.synchronise("end", self.number)
        record.sampler_resumes()

    @harmless
    def _memory_phase(self, phase: str, *, entering: bool) -> None:
        if self._memory is not None:
            self._memory.phase(phase, entering=entering)

    def _end_memory_step(self, record: _Record) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            layout.write_json(record.folder / layout.MEMORY, memory.end())

    # Beginning and end.

    def _become_rank(self) -> _Record | None:
        self._rank = rank_and_world()
        try:
            folder = layout.claim_rank_folder(Path(self.settings.folder), self._rank[0])
        except OSError as error:
            self._closed = True  # nowhere to write: stay out of the way for good
            note("run folder", error)
            return None
        self._record = _Record(folder, self._thread, self.settings.sample_hz)
        self._look_at_the_job()
        self._describe("running")
        return self._record

    @harmless
    def _look_at_the_job(self) -> None:
        """How the job is laid out, looked at while its process groups are there."""
        self._job = self._comms.describe(
            [
                parameter
                for optimizer in self._optimizers
                for group in optimizer.param_groups
                for parameter in group["params"]
            ]
        )

    def _describe(self, status: str) -> None:
        if self._record is None:
            return
        rank, world = self._rank
        layout.write_json(
            self._record.folder / layout.RANK,
            {
                "schema": layout.SCHEMA,
                "rank": rank,
                "world_size": world,
                "status": status,
                "steps": self.number,
                "skipped": self._skipped,
                "argv": sys.argv,
                "communication": self._job,
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
        if self._memory is not None:
            self._memory.end()
        if self._window is not None:
            window, self._window = self._window, None
            note("window", f"the script ended at step {self.number}, inside the window")
            window.stop_early()
            self._windows.append(window)
        for window in self._windows:
            window.close()
        if self._record is not None:
            self._record.close()
        self._describe("finished")

    def _forked(self) -> None:
        """A child of the training is not the training."""
        self._closed = True
        self._window = self._memory = None


class _Record:
    """What a rank writes, and the helpers that write it."""

    def __init__(self, folder: Path, thread: int, sample_hz: float) -> None:
        self.folder = folder
        self.steps = LineWriter(folder / layout.STEPS, with_device_time)
        self.device = DeviceClock()
        self._lines: LineWriter | None = None
        self._clocks = ClockSync()
        self._sampler = Sampler(thread, sample_hz) if sample_hz > 0 else None

    @harmless
    def synchronise(self, label: str, step: int) -> None:
        if self._clocks.synchronise(label, step) is not None:
            layout.write_json(self.folder / layout.CLOCK, self._clocks.content())

    @harmless
    def collectives(self, lines: list[dict[str, Any]]) -> None:
        if lines and self._lines is None:
            self._lines = LineWriter(self.folder / layout.COMMS)
        for line in lines:
            if self._lines is not None:
                self._lines.put(line)

    def sampler_pauses(self) -> None:
        if self._sampler is not None:
            self._sampler.pause()

    def sampler_resumes(self) -> None:
        if self._sampler is not None:
            self._sampler.resume()

    @harmless
    def close(self) -> None:
        self.steps.close()
        if self._lines is not None:
            self._lines.close()
        if self._sampler is not None:
            layout.write_json(self.folder / layout.SAMPLES, self._sampler.close())
