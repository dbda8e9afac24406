"""The profiler window: torch.profiler for a few steps, with our step numbers, then a trace file."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from stepscope.measure.gloo_drain import AT_EXIT_S, PATIENCE_S, collectives_ended
from stepscope.measure.kineto_messages import KinetoMessages, without_thread_complaint
from stepscope.measure.line_sources import write_sources
from stepscope.measure.line_watch import LineWatch, profiler_mark
from stepscope.measure.never_raise import never_raise
from stepscope.measure.own_operators import unseen
from stepscope.measure.trace_file import TraceFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stepscope.measure.schedule import PlannedWindow
    from stepscope.measure.settings import Settings

CLOSURE = "stepscope: closure"  # the forward and backward that an optimizer's step runs


def _detach_afterwards(cuda: str | None) -> None:
    """Ask Kineto to detach CUPTI after the window.

    Otherwise every launch stays slower for the rest of the run: 28 ms steps of GPT-2 small on an
    H200 became 30 to 34 ms. Before CUDA 12.6 detaching disturbs CUDA graphs, so it stays attached.
    """
    version = tuple(int(part) for part in (cuda or "0").split(".")[:2])
    if version >= (12, 6):
        os.environ.setdefault("TEARDOWN_CUPTI", "1")


def _profile(messages: KinetoMessages, **options: Any) -> Any:
    """torch.profiler.profile without its messages."""
    from torch.profiler import profile

    class QuietProfile(profile):  # type: ignore[misc]
        def prepare_trace(self) -> None:
            with without_thread_complaint():
                super().prepare_trace()
            messages.silence()

    return QuietProfile(**options)


class Window:
    """One window from its first warm-up step to its last active one."""

    def __init__(
        self,
        settings: Settings,
        planned: PlannedWindow,
        folder: Path,
        *,
        after: list[Window],
        then: Callable[[], object] = lambda: None,
    ) -> None:
        """`after` holds the previous window, whose file this one may replace; `then` is called when
        the trace is on disk."""
        import torch
        from torch.profiler import ProfilerAction

        first = planned.first
        self._folder = folder
        self.planned = planned
        self.last = planned.last
        self.file: TraceFile = TraceFile(
            folder / planned.file,
            planned.first,
            after=[earlier.file for earlier in after],
            then=then,
        )

        def action(number: int) -> ProfilerAction:
            if number < planned.first_active:
                return ProfilerAction.WARMUP
            if number < self.last:
                return ProfilerAction.RECORD
            return ProfilerAction.RECORD_AND_SAVE if number == self.last else ProfilerAction.NONE

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            _detach_afterwards(torch.version.cuda)
        self._messages = KinetoMessages()
        self.profiler: Any = _profile(
            self._messages,
            activities=activities,
            schedule=action,
            record_shapes=settings.shapes,
            with_stack=settings.stacks,
            with_modules=settings.modules,
            on_trace_ready=self.file.save,
        )
        self.profiler.step_num = first
        self.profiler.current_action = action(first)
        self._lines = LineWatch(profiler_mark) if planned.lines else None
        self._begun = first  # the running step
        self.over = False  # the last step has ended, but the trace is not saved yet
        self._until_ns: int | None = None  # nothing later is recorded

    def owns(self, profiler: Any) -> bool:
        """Whether this is the profiler inside ours."""
        return getattr(self.profiler, "profiler", None) is profiler

    def mark(self, name: str) -> Any:
        """Begin an annotation in the trace; the caller ends it."""
        from torch.profiler import record_function

        annotation = record_function(name)
        annotation.__enter__()
        return annotation

    def start(self) -> None:
        with unseen(), self._messages.unheard():
            self.profiler.start()

    def step(self) -> None:
        """A step ended, and it was not the last one."""
        self._leave_lines()
        with unseen(), self._messages.unheard():
            self.profiler.step()
        self._begun += 1
        if self._lines is not None and self._begun >= self.planned.first_active:
            self._watch_lines(self._lines)

    @never_raise
    def _watch_lines(self, lines: LineWatch) -> None:
        lines.begin()

    @never_raise
    def _leave_lines(self) -> None:
        if self._lines is not None:
            self._lines.end()

    def finish(self) -> bool:
        """After the last step: stop and save the trace.

        False while that step's communication is under way (see gloo_drain.py): recording stops, and
        the caller asks again after a later step.
        """
        self._leave_lines()
        if self._lines is not None and not self.over:
            write_sources(self._folder, self._lines.files)
        patience_s = 0.0 if self.over else PATIENCE_S
        with unseen(), self._messages.unheard():
            self._leave_step()
            if collectives_ended(patience_s, until_ns=self._until_ns):
                self.profiler.step()
                return True
            if not self.over:
                self._suspend()
        self.over = True
        return False

    def abandon(self) -> None:
        """Stop without a trace: the script wants the profiler for itself."""
        self.profiler.on_trace_ready = None
        self.stop()

    def stop(self) -> None:
        """The script ends: stop now and save what there is."""
        self._leave_lines()
        with unseen(), self._messages.unheard():
            self._leave_step()
            collectives_ended(patience_s=AT_EXIT_S, until_ns=self._until_ns)
            self.profiler.stop()

    def _leave_step(self) -> None:
        """End the last step's annotation where the step ends, before any waiting."""
        annotation = getattr(self.profiler, "step_rec_fn", None)
        if annotation is not None:
            self.profiler.step_rec_fn = None
            annotation.__exit__(None, None, None)

    @never_raise
    def _suspend(self) -> None:
        """Stop recording. torch before 2.6 cannot, and records what follows the last step too."""
        toggle = getattr(self.profiler, "toggle_collection_dynamic", None)
        if toggle is not None:
            toggle(False, self.profiler.activities)
            self._until_ns = time.time_ns()

    def let_go(self) -> None:
        """The trace is saved: the profiler's events take memory that the training may need."""
        self.profiler = None

    def close(self) -> None:
        self.file.close()
