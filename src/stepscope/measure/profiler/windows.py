"""The profiler windows of one rank: when one opens and closes and why one does not,
torch.profiler for a few steps without Kineto's messages, the trace file, and which traces
of --every stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gzip
import os
import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from stepscope.measure import folder as layout
from stepscope.measure.cluster.window_collectives import AT_EXIT_S, PATIENCE_S, collectives_ended
from stepscope.measure.never_raise import never_raise, note
from stepscope.measure.patches import unseen
from stepscope.measure.profiler.schedule import PlannedWindow, regular_distance
from stepscope.measure.source_lines import LineWatch, profiler_mark, write_sources
from stepscope.text.figures import duration

if TYPE_CHECKING:
    from stepscope.measure.settings import Settings

# A script's own profiler comes first: no window opens next to it, and an open one is given up.

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
        if self._dear and planned.kind in ("early", "planned"):
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
        if window.planned.kind == "early" and took_s > _DEAR_S:
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
        if planned.kind != "regular":
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

    @never_raise
    def profiler_begins(self, profiler: Any) -> None:
        """Ours, or one of the script's own."""
        window = self.running
        if window is not None and window.owns(profiler):
            return
        self._script_profilers.add(profiler)
        if window is not None:
            self.running = None
            note("window", "the window was dropped: the script used the profiler itself")
            window.abandon()

    @never_raise
    def profiler_ends(self, profiler: Any) -> None:
        self._script_profilers.discard(profiler)

    def close(self, steps: int) -> None:
        """The script ends after this many steps: wait for the files."""
        if self.running is not None:
            self._stop(self.running, steps)
        for window in self._saved:
            window.file.close()

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


# The profiler window: torch.profiler for a few steps, with our step numbers, then a trace file.

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
        self._lines = LineWatch(profiler_mark) if planned.kind == "lines" else None
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

        False while that step's communication is under way: recording stops, and
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


# A window's trace on disk: written by the profiler as text, then compressed; whole or absent.

_TAIL_BYTES = 64


class TraceFile:
    """One file; a thread compresses it if one can be started."""

    def __init__(
        self,
        path: Path,
        mark: int,
        *,
        after: Sequence[TraceFile],
        then: Callable[[], object] = lambda: None,
    ) -> None:
        """`mark` distinguishes the windows of a process; `after` are those it may replace; `then`
        is called when the file has its name."""
        self._path = path
        self._text = layout.temporary(path.with_name(f"{path.name}-{mark}"))
        self._packed = layout.temporary(path.with_name(f"{path.name}-{mark}.gz"))
        self._after = after
        self._then = then
        self._packing: threading.Thread | None = None

    def save(self, profiler: Any) -> None:
        try:
            profiler.export_chrome_trace(str(self._text))
            self._check()
        except Exception as error:
            layout.note_unwritten(layout.TRACE, error)
            self._remove_unfinished()
            return
        packing = threading.Thread(target=self._pack, name="stepscope-gzip")
        try:
            packing.start()
        except RuntimeError:  # no thread can be started: the training waits
            self._pack()
        else:
            self._packing = packing

    def close(self) -> None:
        if self._packing is not None:
            self._packing.join(timeout=60)

    @property
    def is_busy(self) -> bool:
        return self._packing is not None and self._packing.is_alive()

    def _check(self) -> None:
        """The profiler does not report a full disk, but leaves the file cut off."""
        try:
            with self._text.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                whole = file.read().rstrip().endswith(b"}")
        except FileNotFoundError:
            whole = False
        if not whole:
            layout.check_room(self._path.parent)
            raise OSError("the profiler wrote no whole file")

    def _pack(self) -> None:
        try:
            with (
                self._text.open("rb") as source,
                gzip.open(self._packed, "wb", compresslevel=3) as target,
            ):
                shutil.copyfileobj(source, target, 1 << 20)
            for earlier in self._after:
                earlier.close()
            self._packed.replace(self._path)
            self._then()
        except Exception as error:
            layout.note_unwritten(layout.TRACE, error)
        finally:
            self._after = ()
            self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        by_profiler = self._text.with_name(f"{self._text.name}.tmp")
        for file in (by_profiler, self._text, self._packed):
            layout.remove(file)


# The traces of `--every`: bounded in number and bytes however long the run is.
#
# The newest one always stays. Of the others every second, fourth, eighth... one stays, so that
# those left are spread evenly over the run. Which ones follows from the step number and the size of
# a trace: ranks of one job keep the same ones.

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


# Keeps Kineto's messages about our window out of the job's output, and leaves all others in it.
#
# Kineto prints to stderr when a profiler starts and stops. KINETO_LOG_LEVEL would silence the
# script's own profilers too, so the level is raised only while ours works.

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
            text = os.pread(captured, os.fstat(captured).st_size, 0)
            lines = [line for line in text.splitlines(keepends=True) if _OTHER_THREAD not in line]
            if lines:
                os.write(stderr, b"".join(lines))
    finally:
        os.close(captured)
        os.close(stderr)
