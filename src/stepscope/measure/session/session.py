"""Count the steps of one rank, note their times and let each part act when it is due. Called by
hooks, so it costs tens of microseconds a step.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections import deque
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns, time_ns
from typing import Any

from stepscope.measure import folder as layout
from stepscope.measure import processes
from stepscope.measure.cluster.parallel_layout import brief_layout
from stepscope.measure.cluster.window_collectives import Comms
from stepscope.measure.compiler_log import CompilerLog
from stepscope.measure.cuda_graphs import gate
from stepscope.measure.hang.watch import HangWatch
from stepscope.measure.machine import HostLoadMeter
from stepscope.measure.never_raise import never_raise, note
from stepscope.measure.patches import LeftAlone, surrounds
from stepscope.measure.processes import TrainingThread, end_without_destructors, watch_exit
from stepscope.measure.profiler.extra_windows import StallWatch, WindowRequests
from stepscope.measure.profiler.sampler import Sampler
from stepscope.measure.profiler.schedule import PlannedWindow, Schedule
from stepscope.measure.profiler.windows import CLOSURE, OTHER_THREADS, ProfilerWindows
from stepscope.measure.ranks import TraceChoice, choose_here, rank_and_world
from stepscope.measure.session.rank_files import RankFile, RankParts
from stepscope.measure.session.special_steps import SpecialSteps
from stepscope.measure.session.start_up import StartUp
from stepscope.measure.session.trial import TrialLog, await_device, end_process
from stepscope.measure.settings import Settings
from stepscope.measure.steps.loaders import Loaders
from stepscope.measure.steps.optimizers import (
    Optimizers,
    Passes,
    any_optimizer_created,
    trained_parameters,
    what_ends_steps,
    with_closure,
)
from stepscope.measure.steps.pace import Pace
from stepscope.measure.steps.phases import (
    AGAIN,
    ENDED,
    ENTER,
    LEAVE,
    PERHAPS,
    STRETCH,
    Note,
    Stretch,
)
from stepscope.measure.steps.step_times import Anchor, StepLines, StepMeter, step_marks
from stepscope.measure.writer import AsLines, LineWriter, StepPacking, flush_interval_s

# A process becomes a rank when it ends its first step. Until then nothing but a line in its host's
# list of processes is written, so launchers, data-loader workers and helpers leave no rank folder.

# Kept in memory until they can be written: before the first step ends, or on a disk that hangs.
MOST_NOTES = 1 << 16


class Session:
    """Called by hooks at every boundary; costs tens of microseconds a step outside the window."""

    def __init__(
        self, settings: Settings, *, trial: TrialLog | None = None, from_outside: bool = False
    ) -> None:
        """`trial`: what a capture with remedies, or one that ends itself, keeps beside its steps.
        `from_outside`: under `stepscope run`."""
        self.settings = settings
        self.trial = trial
        self.start_up = StartUp(from_outside=from_outside)
        self._number = 0
        self._schedule = Schedule.plan(settings)
        self.pace = Pace()
        self.engines: list[LeftAlone] = []  # hooks around autograd's, not needed in every step
        self.own_ns = 0  # what our hooks took of the running step
        self._began = 0  # the running step; 0 if it was not noted from its beginning
        self._lines = StepLines(self.start_up.began_ns)
        self._meter: StepMeter | None = None
        self.notes: deque[Note] = deque(maxlen=MOST_NOTES)
        self._comms = Comms()
        self.compiler = CompilerLog()
        self.loaders = Loaders()
        self._load = HostLoadMeter()
        self.optimizers = Optimizers()
        self.thread = get_ident()  # the one that trains; 0 once closed
        self._claim = TrainingClaim()
        self._alone = True  # no other thread trains
        self._pid = os.getpid()
        self._parts: RankParts | None = None
        self._training: TrainingThread | None = None
        self._rank_file: RankFile | None = None
        self.windows = ProfilerWindows(settings)
        self._choice = TraceChoice(traced=True, rule="all")  # until the rank is known
        self._stalls: StallWatch | None = None
        self._special = SpecialSteps()
        self._job: dict[str, Any] | None = None
        self.ranges = Ranges() if settings.nvtx else None
        self.phases_wanted = settings.nvtx  # ranges or special steps follow phases
        self._steps_on_optimizer = settings.step_on in ("auto", "optimizer")
        self._anchor = Anchor()
        self.passes = Passes() if settings.step_on == "auto" else None
        self.passes_ended = 0
        self.in_backward = 0
        self._passed = False  # a backward pass ended since the last step did
        self._takes_gradients = False  # without a backward pass
        self._cut = True  # the running step's beginning was not seen
        self._skipped = 0
        self._closed = False
        self._due = self._next_due(0)
        self._in_fork = False  # in a forked child that has not run backward so far
        self.hang = HangWatch(self, self._lines)
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.close)

    @never_raise
    def torch_is_here(self) -> None:
        self._comms.attach()
        processes.record(self.settings.folder, processes.TORCH)

    @property
    def number(self) -> int:
        """Of the running step."""
        return self.pace.first + len(self.pace.ends) if self.pace.passing.on else self._number

    # Called by hooks. Phases count only in the training thread; hooks note them themselves.

    @never_raise
    def phase_changes(self, phase: str, *, entering: bool) -> None:
        """A phase begins or ends: pass it on to NVTX ranges and special steps."""
        if self.ranges is not None:
            if entering:
                self.ranges.push(phase)
            else:
                self.ranges.pop()
        self._special.phase(phase, entering=entering)

    def first_pass_begins(self) -> bool:
        """The thread that runs backward first trains; a trainer may start one for it."""
        if self._in_fork:
            self._trains_in_fork()
        if not (self._closed or self.number or self.in_backward) and self._claim.take():
            self.thread = get_ident()
            self.start_up.backward_begins()
        return get_ident() == self.thread

    def pass_begins(self, roots: Any = ()) -> bool:
        """True for a pass that is not inside another one."""
        self.in_backward += 1
        if self.in_backward > 1:
            return False
        if self.phases_wanted:
            self._special.pass_begins(roots)
        if self.passes is not None and not self.optimizers.own_passes:
            self._ask_passes(roots)
        return True

    @never_raise
    def _ask_passes(self, roots: Any) -> None:
        assert self.passes is not None
        if self.passes.begins(roots, optimizer_exists=any_optimizer_created()):
            self.note_from_here()
            self._step_ends()
            self._cut = True  # the next step has already begun

    def pass_ends(self, outermost: bool) -> None:
        self.in_backward -= 1
        if not outermost:
            return
        self._passed = True
        self.passes_ended += 1
        if self.passes_ended == 1:
            processes.record(self.settings.folder, processes.BACKWARD)
        if self.passes is not None:
            if not self.optimizers.own_passes:
                self._end_pass()
        elif self.settings.step_on == "backward":
            self.step_ends()

    @never_raise
    def _end_pass(self) -> None:
        assert self.passes is not None
        if self.passes.ends(optimizer_exists=any_optimizer_created()):
            if self.pace.passing.on:
                self.unnoted_step_ends()
            else:
                self._step_ends()

    @never_raise
    def gradient_was_taken(self) -> None:
        """A script without an optimizer took a gradient; it may never call backward."""
        if gate.is_capturing or any_optimizer_created() or not self.first_pass_begins():
            return
        self._takes_gradients = True
        self.pass_begins()
        self.pass_ends(outermost=True)
        self._claim.release()

    def before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """A hook as torch calls it; one optimizer may wrap another."""
        try:
            if self.pace.passing.here:
                self.note_from_here()
            began = perf_counter_ns()
            if not self._is_training_thread() or not self.optimizers.begins(optimizer):
                return None
            now = perf_counter_ns()
            self.notes.append((ENTER, now, "optimizer"))
            self.own_ns += now - began
            if self.phases_wanted:
                self.phase_changes("optimizer", entering=True)
            return with_closure(
                args, kwargs, lambda closure: timed_closure(closure, self.notes, self.windows)
            )
        except Exception as error:
            note("before an optimizer's step", error)
            return None

    def after_optimizer(self, optimizer: Any) -> None:
        try:
            if self.pace.passing.here:
                self._unnoted_ends(optimizer)
                return
            if get_ident() != self.thread or not self.optimizers.ends():
                return
            self.notes.append((LEAVE, perf_counter_ns(), "optimizer"))
            if self.phases_wanted:
                self.phase_changes("optimizer", entering=False)
            self._optimizer_stepped(optimizer)
        except Exception as error:
            note("after an optimizer's step", error)

    def _optimizer_stepped(self, optimizer: Any) -> None:
        if self._steps_on_optimizer:
            passes, self.passes = self.passes, None
            self._end_steps(self._anchor.ends_steps(optimizer), passes)

    def unnoted_step_ends(self) -> None:
        """As the hook of optimizers ends one (hooks.py)."""
        ends = self.pace.ends
        ends.append(perf_counter_ns())
        if len(ends) >= self.pace.passing.room:
            self.stretch_ends()

    def _unnoted_ends(self, optimizer: Any) -> None:
        """An optimizer has stepped in a step that is not noted, and it is not the anchor."""
        if not self._steps_on_optimizer or self.passes is not None:
            return
        if self.optimizers.look_for_nests():
            self.note_from_here()  # it ends with the outermost one
            self.after_optimizer(optimizer)
        else:
            self.note_from_here(ends=True)
            self._optimizer_stepped(optimizer)

    # Where no optimizer is seen, passes are counted in steps that are not noted as well.

    def unnoted_pass_begins(self, roots: Any) -> bool:
        """True for a pass that is not inside another one."""
        self.in_backward += 1
        if self.in_backward > 1:
            return False
        self._ask_passes(roots)
        return True

    def unnoted_pass_ends(self, outermost: bool) -> None:
        self.in_backward -= 1
        if outermost:
            self._end_pass()

    @never_raise
    def note_from_here(self, at: int = 0, *, ends: bool = False) -> None:
        """Note what happens in the running step from `at` on, by default now; `ends`: that is its
        end."""
        pace = self.pace
        if not pace.passing.on:
            return
        last = pace.ends[-1] if pace.ends else pace.began
        seen = pace.seen_others()
        begins = min([at or perf_counter_ns(), *(stepped for stepped, _ in seen)])
        self._end_stretch(max(begins, last), None, None, noted=False)
        self._began = 0
        if self._parts is not None and self._parts.device is not None:
            self._parts.device.cut()
        if not ends and self.passes is None:
            self.optimizers.resume()
        for stepped, other in seen:
            self._anchor.ends_steps(other)
            self.notes.append((PERHAPS, stepped, time_ns() - (perf_counter_ns() - stepped)))

    @never_raise
    def stretch_ends(self) -> None:
        """The step that begins is noted."""
        pace, parts = self.pace, self._parts
        ended = pace.ends[-1]
        device = parts.device if parts is not None else None
        events = device.mark() if device is not None else None
        reading = None
        if self._meter is not None:
            reading = self._meter.read(ended, pace.longest(pace.ends))
        now = perf_counter_ns()
        self._end_stretch(now, events, reading, noted=True)
        self._began, self.own_ns = now, now - ended

    def _end_stretch(self, at: int, events: Any, reading: Any, *, noted: bool) -> None:
        pace = self.pace
        self._number = self.number
        ends = pace.end()
        unix_ns = time_ns() - (perf_counter_ns() - ends[-1]) if ends else 0
        stretch = Stretch(pace.first, pace.began, ends, unix_ns, events, reading, noted)
        self.notes.append((STRETCH, at, stretch))
        for engine in self.engines:
            engine.come_back()

    def _pass_over(self) -> None:
        """Do not note the next steps, if that is their turn."""
        pace = self.pace
        if not self._may_pass_over:
            return
        until = min(pace.next_noted(self._number), self._due - 1)
        if until > self._number:
            pace.passing.thread, pace.passing.anchor = self.thread, self._anchor.latest
            pace.others.clear()
            pace.others.update(self._anchor.others)
            pace.begin(self._number, until, by_passes=self.passes is not None)
            pace.passing.room = min(pace.passing.room, self._due - 1 - pace.first)  # see `wake`
            for engine in self.engines if self.passes is None else ():
                engine.leave()
            pace.begun(perf_counter_ns())

    @property
    def _may_pass_over(self) -> bool:
        """Whether the next step's end will be seen without its phases."""
        if self.in_backward or self.phases_wanted or self.optimizers.nest or not self._alone:
            return False
        if self.trial is not None and self.trial.keeps_losses:
            return False
        if self.settings.step_on == "call":
            return not self.optimizers.own_passes
        passes = self.passes
        seen = passes is None or (passes.ends_steps and not self._takes_gradients)
        return self._steps_on_optimizer and seen and not self.optimizers.own_passes

    def _end_steps(self, ended: int, passes: Passes | None) -> None:
        """An optimizer's step has shown that this many steps are over, if not `passes` before."""
        if passes is not None and passes.ended_step:
            self._cut = True  # the next step has begun with what the optimizer did
            return
        if not ended:
            self.notes.append((PERHAPS, perf_counter_ns(), time_ns()))
            self._claim.release()
            return
        two = ended == 2 and self.is_plain and self.number + 2 < self._due
        self._number += two
        self._step_ends(two=two)

    @property
    def is_plain(self) -> bool:
        """Whether the running step is neither profiled nor a special one."""
        return self.windows.running is None and self._special.mark is None

    def _is_training_thread(self) -> bool:
        """Whether this is the first thread that trains; remember whether others train too."""
        here = get_ident()
        if not (self.number or self.passes_ended or self._closed) and self._claim.take():
            self.thread = here
        if here != self.thread and not self._closed:
            self._alone = False
            note("threads", OTHER_THREADS)
        return here == self.thread

    @never_raise
    def boundary(self) -> None:
        """A batch is requested or a forward pass begins: a backward pass before it ended a step."""
        if self._passed:
            self._step_ends()

    @never_raise
    def step_was_seen(self, *, skipped: bool = False) -> None:
        """Without a call of an optimizer: a CUDA graph replayed it, or a scaler `skipped` it."""
        if self._steps_on_optimizer and get_ident() == self.thread:
            if self.pace.passing.on and not skipped:
                self.unnoted_step_ends()
                return
            self.note_from_here()
            self.passes = None
            self._skipped += skipped
            self._step_ends(skipped=skipped)

    @never_raise
    def group_ends(self) -> None:
        self._comms.group_ends()
        if self._parts is not None:
            self._parts.look_at_links(self.number)
        if self._training is not None:
            self._training.wait_until_closed()

    @never_raise
    def step_ends(self) -> None:
        if self.pace.passing.here:
            self.unnoted_step_ends()
        elif self._is_training_thread():
            self._step_ends()

    def _step_ends(
        self, at: int = 0, *, skipped: bool = False, last: bool = False, two: bool = False
    ) -> None:
        """Note the step's times and prepare the next one."""
        if self._closed or gate.is_capturing:
            return
        parts = self._parts or self._become_rank()
        if parts is None:
            return
        now, number = at or perf_counter_ns(), self.number
        window = self.windows.running is not None
        events = parts.device.mark() if parts.device is not None else None
        marks = step_marks(skipped=skipped, first=self._cut, last=last, own=self._special.mark)
        said = self._meter.read(now) if self._meter is not None else None
        self.notes.append((ENDED, now, (number, time_ns(), window, events, marks, two, said)))
        self._number = number + 1
        self._passed = self._cut = False
        if number + 1 >= self._due or window or marks:
            self._act(parts)
            self._began = 0
            return
        began, self._began = self._began, 0
        self._pass_over()
        ended = perf_counter_ns()
        if began:
            self.pace.noted(now - began, self.own_ns + ended - now)
        self._began, self.own_ns = ended, 0

    def wake(self, step: int) -> None:
        """In the writer's thread: the schedule has changed (`_act` reads it and sets `_due`)."""
        self._due = min(self._due, step)
        passing = self.pace.passing
        passing.room = min(passing.room, step - 1 - self.pace.first)

    def _act(self, parts: RankParts) -> None:
        """The time this takes lies between two steps and belongs to neither."""
        if self.trial is not None and self.number >= self.trial.stop_after:
            await_device()  # the host may be many steps ahead: their times would not be known
            self.close()
            end_process(parts.folder, rank_and_world()[1])
        self._load.pause(self.number, self.optimizers.known)
        self._end_special_step(parts)
        parts.look_at_others(self.number, disturbed=self.windows.running is not None)
        self._due = min(self._next_due(self.number + 1), parts.due(self.number + 1))
        step = self.number
        planned = self._schedule.opens(step)
        if planned is not None:
            parts.sampler_pauses()
            if planned.meets:
                parts.synchronise("start", self.number)  # on every rank, even if no window opens
            if self._choice.traced and self.windows.open(
                planned, parts.folder, one_thread_trains=self._alone
            ):
                self._comms.window_begins(self.number)
        elif (closes := self._schedule.closes(step)) is not None:
            self._close_window(parts, closes)
        elif self._schedule.is_special(step):
            if self._alone and self._choice.traced and self.windows.running is None:
                self._special.begin(
                    self.number, self._schedule, self.optimizers.known, self.settings
                )
                self.phases_wanted = self.ranges is not None or self._special.mark is not None
        elif self.windows.step_begins(step):
            self._comms.step_begins(step)
        self._load.resume(self.number, plain=self.is_plain)
        now = perf_counter_ns()
        self.notes.append((AGAIN, now, None))
        if self._meter is not None:
            self._meter.restart(now)
        if parts.device is not None:
            parts.device.restart()

    def _next_due(self, step: int) -> int:
        ends = self.trial.stop_after if self.trial is not None else sys.maxsize
        return min(self._schedule.next_due(step), ends)

    def _close_window(self, parts: RankParts, planned: PlannedWindow) -> None:
        if (window := self.windows.running) is not None:
            self.windows.finish(window)
            lines = self._comms.window_ends(self.number - 1)
            if not planned.alone:
                parts.collectives(lines, planned.comms_file)
        self._read_job_layout()
        if planned.meets:
            parts.look_at_links(self.number)
            parts.synchronise("end", self.number)
        parts.sampler_resumes()

    def _end_special_step(self, parts: RankParts) -> None:
        if self._special.mark is not None:
            self.phases_wanted = self.ranges is not None
            if self._special.end(parts.folder):
                self._describe("running")  # a job that is killed keeps it

    def _become_rank(self) -> RankParts | None:
        rank, world_size = rank_and_world()
        try:
            folder = layout.claim_rank_folder(Path(self.settings.folder), rank)
        except OSError as error:
            self._closed = True  # nowhere to write: capture nothing
            self.thread = 0
            note("run folder", layout.why_refused(error))
            return None
        self._choice = choice = choose_here(self.settings.ranks, rank, world_size)
        lines: AsLines = self._lines
        if self.settings.on_stall and choice.traced:
            lines = self._stalls = StallWatch(lines, self, self._schedule, folder)
        tail = folder / layout.STEPS
        pause_s = flush_interval_s(world_size)
        steps = LineWriter(
            tail, self.notes, lines, StepPacking(tail), flush_s=pause_s, spent=self.pace.wrote
        )
        self._meter = StepMeter()
        sampler, hz = None, self.settings.sample_hz if choice.traced else 0.0
        if hz > 0:
            late = self._schedule.last_due
            sampler = Sampler(self.thread, hz, lambda: self.number, closely_from=late)
        requests = WindowRequests(self, self._schedule, folder.parent, pause_s)
        compiler = self.compiler.of_rank(traced=choice.traced)
        self._parts = RankParts(folder, steps, sampler, requests, compiler)
        self._due = min(self._due, self._parts.due(self.number + 1))
        self._rank_file = RankFile(folder, rank, world_size)
        self._read_job_layout()
        self._load.resume(self.number + 1, plain=True)
        self._describe("running")
        processes.record(self.settings.folder, processes.STEP, rank=rank, rank_folder=folder.name)
        self._training = TrainingThread(self.close)
        self.hang.start(folder)
        processes.watch_end_of_child(self)
        return self._parts

    @never_raise
    def _read_job_layout(self) -> None:
        """Read the job's layout while its process groups exist."""
        job = self._comms.describe(trained_parameters(self.optimizers.known))
        self._job = job if self._choice.traced else brief_layout(job)

    @never_raise
    def _describe(self, status: str) -> None:
        if self._rank_file is None:
            return
        if self.trial is not None and self._parts is not None and status == "finished":
            self.trial.write(self._parts.folder)
        progress = {
            "steps": self.number,
            "steps_end_with": what_ends_steps(self.settings.step_on, self.passes),
            "skipped": self._skipped,
            "trace": {"chosen": self._choice.traced, "ranks": self._choice.rule},
            "windows": self.windows.content(),
            "stall_window": self._stalls.content() if self._stalls is not None else None,
            "start_up": self.start_up.content(),
            "counters": self._meter.content() if self._meter is not None else None,
            "pace": self.pace.content(),
            "after_last_step": self._lines.after_last_step() if status == "finished" else None,
            "remedies": self.trial.remedies() if self.trial is not None else [],
            "data": self.loaders.content(frozenset(self._lines.trained), last=status == "finished"),
        }
        surroundings = {"communication": self._job, "optimizer_lines": self.optimizers.lines}
        surroundings |= {"host_load": self._load.content(), "host_steps": self._special.content()}
        self._rank_file.write(status, progress, surroundings)

    @never_raise
    def close(self, *, at_once: bool = False) -> None:
        """At exit; further calls do nothing. `at_once`: a window that runs is given up."""
        if self._closed or os.getpid() != self._pid:
            return
        self._end_last_step()
        self.note_from_here()
        self._closed = True
        self.hang.close()
        self.thread = 0
        self._load.pause(self.number)
        self._special.abandon()
        if self._parts is not None:
            self._parts.close(self.number)  # before the window, whose stop may wait
        if not at_once:
            self.windows.close(self.number)
        self._describe("finished")

    @never_raise
    def _end_last_step(self) -> None:
        """Where a step ends only when the next one begins, the last one ends here."""
        follows = self.settings.step_on in ("forward", "dataloader")
        if self.passes is not None and self.passes.ends_steps:
            follows = self.passes.is_amid_step
        if self._passed and follows:
            self._due = sys.maxsize
            self._step_ends(last=True)

    def _forked(self) -> None:
        """In a forked child. Of a parent that has trained, capture nothing, but say so if the child
        trains too: the parent's threads and profiler are not here. Else it may become a rank."""
        has_trained = bool(self.number or self.passes_ended or self.in_backward)
        self._in_fork = True
        self.thread = 0
        self.pace.passing.on = self.pace.passing.quiet = False
        self.windows.running = None
        self._special.forget()
        if self.windows.ever_started:
            end_without_destructors()
        if has_trained or self._closed or self.trial is not None:
            self._closed = True
            return
        self._pid = os.getpid()
        self._claim = TrainingClaim()
        self.notes.clear()

    @never_raise
    def _trains_in_fork(self) -> None:
        """The first backward pass of a forked child."""
        self._in_fork = False
        if self._closed:
            processes.record(self.settings.folder, processes.FORKED)
            return
        processes.record(self.settings.folder, processes.TORCH)
        # multiprocessing's children leave by os._exit: no exit handler runs.
        if util := sys.modules.get("multiprocessing.util"):
            util.Finalize(None, self.close, exitpriority=0)
        watch_exit(self)


# A closure that is given to an optimizer holds the step's forward and backward.


def timed_closure(closure: Any, notes: deque[Note], windows: ProfilerWindows) -> Any:
    """The closure, with its time noted as forward: it is not the optimizer's."""

    @surrounds
    @functools.wraps(closure)
    def timed(*args: Any, **kwargs: Any) -> Any:
        window = windows.running
        mark = window.mark(CLOSURE) if window is not None else None
        notes.append((ENTER, perf_counter_ns(), "forward"))
        try:
            return closure(*args, **kwargs)
        finally:
            notes.append((LEAVE, perf_counter_ns(), "forward"))
            if mark is not None:
                mark.__exit__(None, None, None)

    return timed


# Which thread trains: the first one that asks.


class TrainingClaim:
    """Threads may ask at the same time. Taking it is one operation, which no other thread can come
    between, so only one of them becomes a rank."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def take(self) -> bool:
        """Whether this thread has it now."""
        return self._taken.setdefault("by", get_ident()) == get_ident()

    def release(self) -> None:
        """What was taken for training was none."""
        self._taken.clear()


# NVTX ranges for people who run Nsight around us: phases and modules. NCCL marks its own calls.


class Ranges:
    """Pushes and pops; does nothing where torch has no CUDA."""

    def __init__(self) -> None:
        self._nvtx: Any = None
        self._open = 0

    @never_raise
    def push(self, name: str) -> None:
        if self._nvtx is None:
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_available():
                self._nvtx = torch.cuda.nvtx
        if self._nvtx is not None:
            self._nvtx.range_push(f"stepscope: {name}")
            self._open += 1

    @never_raise
    def pop(self) -> None:
        if self._open:
            self._open -= 1
            self._nvtx.range_pop()
