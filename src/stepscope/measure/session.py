"""One rank's capture: counts steps, keeps the truth, and lets each part act when it is due.

A process becomes a rank when it ends its first step. Until then nothing is created, so launchers,
data-loader workers and helpers leave no trace in the run folder.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from stepscope.measure import folder as layout
from stepscope.measure.clock import ClockSync
from stepscope.measure.comms import Comms
from stepscope.measure.forked import end_without_destructors
from stepscope.measure.harmless import harmless, note, problems
from stepscope.measure.host_load import HostLoad
from stepscope.measure.memory import MemoryStep
from stepscope.measure.ranges import Ranges
from stepscope.measure.ranks import facts, rank_and_world
from stepscope.measure.sampler import Sampler
from stepscope.measure.schedule import Schedule
from stepscope.measure.steps import AGAIN, ENDED, ENTER, LEAVE, Anchor, DeviceClock, StepLines
from stepscope.measure.window import Window
from stepscope.measure.writer import LineWriter, append_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.measure.settings import Settings
    from stepscope.measure.steps import Note

# Kept in memory while nobody writes them down: before the first step ends, or on a disk that hangs.
MOST_NOTES = 1 << 16


class Session:
    """Called by hooks at every boundary; costs tens of microseconds a step outside the window."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.optimizer_calls = 0
        self.number = 0  # of the running step
        self._schedule = Schedule.of(settings)
        self._began_ns = perf_counter_ns()
        self.notes: deque[Note] = deque(maxlen=MOST_NOTES)
        self._comms = Comms()
        self._load = HostLoad()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._optimizer: Callable[[], Any] = lambda: None  # the last one that stepped
        self.thread = get_ident()  # the one that trains; 0 once closed
        self._pid = os.getpid()
        self._rank = (0, 1)
        self._record: _Record | None = None
        self._window: Window | None = None
        self._windows: list[Window] = []
        self._profiled = False  # ever
        self._memory: MemoryStep | None = None
        self._job: dict[str, Any] | None = None
        self._ranges = Ranges() if settings.nvtx else None
        self.listens = settings.nvtx  # somebody wants to be told of phases
        self._steps_on_optimizer = settings.step_on == "optimizer"
        self._anchor = Anchor()
        self._depth = 0  # of optimizers inside each other
        self._forwards = 0
        self._skipped = 0
        self._closed = False
        self._due = _next_due(self._schedule, 0)
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.close)

    @harmless
    def torch_is_here(self) -> None:
        """Once torch is imported."""
        self._comms.attach()

    # What hooks report. Phases count only in the thread that trains; hooks note them themselves.

    @harmless
    def tell(self, phase: str, *, entering: bool) -> None:
        """Whoever else listens, that a phase begins or ends."""
        if self._ranges is not None:
            if entering:
                self._ranges.push(phase)
            else:
                self._ranges.pop()
        if self._memory is not None:
            self._memory.phase(phase, entering=entering)

    def before_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """A hook as torch calls it; one optimizer may wrap another."""
        self._depth = depth = self._depth + 1
        if depth > 1:
            return
        try:
            self.optimizer_calls += 1
            if self._optimizer() is not optimizer:
                self._optimizer = weakref.ref(optimizer)
                self._optimizers.add(optimizer)
            if get_ident() == self.thread:
                self.notes.append((ENTER, perf_counter_ns(), "optimizer"))
                if self.listens:
                    self.tell("optimizer", entering=True)
        except Exception as error:
            note("before an optimizer's step", error)

    def after_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        self._depth = 0
        try:
            if get_ident() == self.thread:
                self.notes.append((LEAVE, perf_counter_ns(), "optimizer"))
                if self.listens:
                    self.tell("optimizer", entering=False)
            if self._steps_on_optimizer and self._anchor.ends_step(optimizer):
                self._step_ends()
        except Exception as error:
            note("after an optimizer's step", error)

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
        if self._steps_on_optimizer:
            self._skipped += 1
            self._step_ends(skipped=True)

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
    def step_ends(self) -> None:
        """The running step is over."""
        self._step_ends()

    def _step_ends(self, *, skipped: bool = False) -> None:
        """Note its times, act for the next one."""
        if self._closed:
            return
        record = self._record or self._become_rank()
        if record is None:
            return
        now, number, window = perf_counter_ns(), self.number, self._window is not None
        events = record.device.mark() if record.device is not None else None
        usual = number and self._memory is None and not skipped
        marks = () if usual else self._marks(skipped=skipped)
        self.notes.append((ENDED, now, (number, time.time_ns(), window, events, marks)))
        self.number = number + 1
        if number + 1 >= self._due or window or marks:
            self._act(record)

    def _marks(self, *, skipped: bool) -> tuple[str, ...]:
        """What is unusual about the step that ends."""
        found = {
            "skipped": skipped,
            "first": self.number == 0,  # its beginning was not seen
            "memory": self._memory is not None,  # its times are not the training's
        }
        return tuple(mark for mark, holds in found.items() if holds)

    # The schedule: what does the step that now begins need?

    def _act(self, record: _Record) -> None:
        """Whatever this does takes time between two steps that belongs to neither."""
        self._due = _next_due(self._schedule, self.number + 1)
        self._load.pause(self.number, self._optimizers)
        self._end_memory_step(record)
        self._begin(record)
        self._load.resume(self.number, plain=self._window is None and self._memory is None)
        self.notes.append((AGAIN, perf_counter_ns(), None))
        if record.device is not None:
            record.device.restart()

    def _begin(self, record: _Record) -> None:
        step = self.number
        opens = self._schedule.opens(step)
        if opens is not None:
            self._open_window(record, opens)
        elif self._schedule.closes(step):
            self._close_window(record)
        elif self._schedule.measures_memory(step):
            self._memory = MemoryStep(list(self._optimizers))
            self.listens = True
            self._memory.begin()
        elif self._window is not None and self._window.over:
            self._finish_late(self._window)
        elif self._window is not None:
            self._window.step()
            self._comms.step_begins(step)

    def _open_window(self, record: _Record, number: int) -> None:
        import torch

        record.sampler_pauses()
        record.synchronise("start", self.number)  # on every rank, whatever becomes of the window
        if self._window is not None:
            self._finish(self._window)
        if self._window is not None:
            note("window", "collectives of the last window are under way; no other was opened")
            return
        if torch.autograd._profiler_enabled():
            note("window", "the script's own profiler is running; no window was opened")
            return
        window = Window(self.settings, self.number, record.folder, repeat=number)
        self._profiled = True
        window.start()
        self._window = window
        self._comms.window_begins(self.number)

    def _close_window(self, record: _Record) -> None:
        window = self._window
        if window is not None:
            self._finish(window)
            record.collectives(self._comms.window_ends(self.number - 1))
        self._look_at_the_job()
        record.synchronise("end", self.number)
        record.sampler_resumes()

    def _finish(self, window: Window) -> None:
        self._window = None
        if window.finish():
            self._windows.append(window)
        else:
            self._window = window

    def _finish_late(self, window: Window) -> None:
        """Asked again ever more rarely: behind the 1st, 2nd, 4th, 8th... step too late."""
        late = self.number - window.last - 1
        if late & (late - 1) == 0:
            self._finish(window)

    def _end_memory_step(self, record: _Record) -> None:
        memory, self._memory = self._memory, None
        self.listens = self._ranges is not None
        if memory is not None:
            layout.write_json(record.folder / layout.MEMORY, memory.end())

    # Beginning and end.

    def _become_rank(self) -> _Record | None:
        self._rank = rank_and_world()
        try:
            folder = layout.claim_rank_folder(Path(self.settings.folder), self._rank[0])
        except OSError as error:
            self._closed = True  # nowhere to write: stay out of the way for good
            self.thread = 0
            note("run folder", error)
            return None
        lines = StepLines(self._began_ns)
        steps = LineWriter(folder / layout.STEPS, self.notes, lines)
        self._record = _Record(folder, steps, self.thread, self.settings.sample_hz)
        self._look_at_the_job()
        self._load.resume(self.number + 1, plain=True)
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
                "host_load": self._load.content(),
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
        self.thread = 0
        self._load.pause(self.number)
        if self._memory is not None:
            self._memory.end()
        if self._record is not None:
            # Before the window: its stop may wait, and a launcher may not.
            self._record.close()
        if self._window is not None:
            window, self._window = self._window, None
            if not window.over:
                note("window", f"the script ended at step {self.number}, inside the window")
            window.stop()
            self._windows.append(window)
        for window in self._windows:
            window.close()
        self._describe("finished")

    def _forked(self) -> None:
        """A child of the training is not the training."""
        self._closed = True
        self.thread = 0
        self._window = self._memory = None
        if self._profiled:
            end_without_destructors()


def _next_due(schedule: Schedule, step: int) -> int:
    """The first step from this one on before which the schedule has something to do."""
    cycle = schedule.cycle
    begin = step // cycle * cycle
    last = cycle * schedule.repeat
    for place in sorted({begin + schedule.wait, begin, begin + cycle, last + 1}):
        if place >= step and (
            schedule.opens(place) is not None
            or schedule.closes(place)
            or schedule.measures_memory(place)
        ):
            return place
    return sys.maxsize


class _Record:
    """What a rank writes, and the helpers that write it."""

    def __init__(self, folder: Path, steps: LineWriter, thread: int, sample_hz: float) -> None:
        self.folder = folder
        self._steps = steps
        self.device = DeviceClock.here()
        self._writing: list[threading.Thread] = []
        self._clocks = ClockSync()
        self._sampler = Sampler(thread, sample_hz) if sample_hz > 0 else None

    @harmless
    def synchronise(self, label: str, step: int) -> None:
        if self._clocks.synchronise(label, step) is not None:
            layout.write_json(self.folder / layout.CLOCK, self._clocks.content())

    @harmless
    def collectives(self, lines: list[dict[str, Any]]) -> None:
        """They come once a window: a thread that ends with them, not one that keeps waking."""
        if lines:
            thread = threading.Thread(
                target=self._write_collectives, args=(lines,), name="stepscope-comms", daemon=True
            )
            thread.start()
            self._writing.append(thread)

    @harmless
    def _write_collectives(self, lines: list[dict[str, Any]]) -> None:
        append_lines(self.folder / layout.COMMS, map(json.dumps, lines))

    def sampler_pauses(self) -> None:
        if self._sampler is not None:
            self._sampler.pause()

    def sampler_resumes(self) -> None:
        if self._sampler is not None:
            self._sampler.resume()

    @harmless
    def close(self) -> None:
        self._steps.close()
        for thread in self._writing:
            thread.join(timeout=5)
        if self._sampler is not None:
            layout.write_json(self.folder / layout.SAMPLES, self._sampler.close())
