"""Profile, estimate and read runs for scripts: at most one job of a kind a script at a time,
the newest request wins, the work is done in a child.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import NotCapturedError, StepscopeError
from stepscope.measure.folder import HOME
from stepscope.records.source_lines import LineCosts
from stepscope.trace.files import list_folder, may_exist
from stepscope.trace.run_folder.run_state import RUN, read_origin
from stepscope.ui.jobs.environment import own_python
from stepscope.ui.jobs.process import kill_group
from stepscope.ui.lsp.measured_run import MeasuredRun
from stepscope.ui.lsp.script_state import EditorSettings, LiveStep, ScriptState

if TYPE_CHECKING:
    from stepscope.ui.editor.profile_child import ProfiledScript

# Everything here runs on the server's loop; the work itself blocks threads that wait for children.

SAVE_DELAY_S = 0.5  # editors save several times in a row
EDIT_DELAY_S = 0.3
_LIVE_S = 0.5
_LAST_LINES = 3  # of the output of a script that failed
_MOST_TRIED = 3  # runs that are read until one tells what lines cost

_STOPPED = "the profile was stopped"

Act = Callable[[threading.Event], Awaitable[None]]


@dataclass(slots=True)
class _Wanted:
    act: Act
    due: float  # on the loop's clock


class _NewestWins:
    """One worker a name: a new request stops the one that runs and replaces the one that waits."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Wanted] = {}
        self._running: dict[str, threading.Event] = {}
        self._workers: dict[str, asyncio.Task[None]] = {}

    def ask(self, name: str, act: Act, delay_s: float) -> None:
        due = asyncio.get_running_loop().time() + delay_s
        self._waiting[name] = _Wanted(act, due)
        if name in self._running:
            self._running[name].set()
        if name not in self._workers:
            self._workers[name] = asyncio.create_task(self._work(name))

    def stop(self, name: str) -> bool:
        """Return whether there was anything to stop."""
        waiting = self._waiting.pop(name, None)
        running = self._running.get(name)
        if running is not None:
            running.set()
        return waiting is not None or running is not None

    async def stop_all(self) -> None:
        """Wait until every child has ended."""
        for name in list(self._workers):
            self.stop(name)
        await asyncio.gather(*self._workers.values(), return_exceptions=True)

    async def _work(self, name: str) -> None:
        try:
            while (request := self._waiting.get(name)) is not None:
                left = request.due - asyncio.get_running_loop().time()
                if left > 0:
                    await asyncio.sleep(left)
                    continue  # it may have been replaced meanwhile
                del self._waiting[name]
                self._running[name] = stop = threading.Event()
                try:
                    await request.act(stop)
                finally:
                    stop.set()  # also if the server ends: threads wait for it
                    del self._running[name]
        finally:
            del self._workers[name]


class ScriptJobs:
    """`changed(state)` is called whenever something new can be shown, `live(state)` while a
    profile trains."""

    def __init__(
        self,
        room: WorkRoom,
        changed: Callable[[ScriptState], None],
        live: Callable[[ScriptState], None],
    ) -> None:
        self._room, self._changed, self._live = room, changed, live
        self._jobs = _NewestWins()

    def profile(self, state: ScriptState, work: ScriptWork, delay_s: float = 0.0) -> None:
        self._jobs.ask(_profile(state), lambda stop: self._profile(state, work, stop), delay_s)

    def stop(self, state: ScriptState) -> bool:
        return self._jobs.stop(_profile(state))

    def estimate(self, state: ScriptState, work: ScriptWork, texts: Mapping[Path, str]) -> None:
        """`texts` are those of its files as they are now."""
        self._jobs.ask(
            _estimate(state), lambda stop: self._estimate(state, work, texts, stop), EDIT_DELAY_S
        )

    def forget_estimate(self, state: ScriptState) -> None:
        self._jobs.stop(_estimate(state))

    def look_for_runs(self, state: ScriptState, roots: list[Path]) -> None:
        """Show the newest run that tells what lines cost; another editor may have made it."""
        self._jobs.ask(f"look {state.script}", lambda stop: self._look(state, roots, stop), 0.0)

    async def report(self, state: ScriptState) -> str | None:
        """Return the path of the report, written first if it is not there."""
        measured = state.measured
        if measured is None or measured.report is None or measured.costs.run is None:
            raise NotCapturedError(f"{state.script.name} was not measured yet: profile it first")
        report = Path(measured.report)
        if not report.is_file():
            run = Path(measured.costs.run)
            await asyncio.to_thread(self._room.write_report, run, report, threading.Event())
        return measured.report

    async def close(self) -> None:
        await self._jobs.stop_all()
        await asyncio.to_thread(self._room.close)

    async def _profile(self, state: ScriptState, work: ScriptWork, stop: threading.Event) -> None:
        state.error = None
        try:
            folder = await asyncio.to_thread(new_editor_run, work.script)
        except OSError as error:
            state.error = f"no run folder can be made beside {work.script}: {error.strerror}"
            self._changed(state)
            return
        state.running_since = datetime.now(UTC).isoformat(timespec="seconds")
        self._changed(state)
        following = asyncio.create_task(self._follow(state, folder))
        captured = False
        try:
            captured = await self._capture(state, work, folder, stop)
            if captured:
                await self._read(state, folder, stop)
                self._prepare_estimates(state, work)
        finally:
            following.cancel()
            state.running_since = state.live = None
            is_kept = captured and not stop.is_set()
            await asyncio.to_thread(discard_old_runs if is_kept else discard_run, folder)
            self._changed(state)
            self._live(state)

    async def _capture(
        self, state: ScriptState, work: ScriptWork, folder: Path, stop: threading.Event
    ) -> bool:
        """Return whether there is a run to read."""
        try:
            profiled = await asyncio.to_thread(self._room.profile, work, folder, stop)
        except Exception as error:
            state.error = _why(error)
            return False
        if stop.is_set():
            state.error = _STOPPED
        elif profiled.run is None:
            words = (profiled.failed or "nothing was captured", *profiled.output[-_LAST_LINES:])
            state.error = "\n".join(words)
        return state.error is None

    async def _read(self, state: ScriptState, run: Path, stop: threading.Event) -> None:
        try:
            measured = await asyncio.to_thread(self._room.read, run, state.script, stop)
        except Exception as error:
            state.error = _why(error)
        else:
            state.set_measured(measured)

    def _prepare_estimates(self, state: ScriptState, work: ScriptWork) -> None:
        """An estimate of the measured text, thrown away: what it needs is then at hand."""
        if state.measured is None or state.error is not None or not work.settings.estimate:
            return
        measured = state.measured.costs

        async def estimate(stop: threading.Event) -> None:
            with contextlib.suppress(Exception):  # it is said when an edit asks for it
                await asyncio.to_thread(self._room.estimate, work, {}, measured, stop)

        self._jobs.ask(f"prepare {state.script}", estimate, 0.0)

    async def _follow(self, state: ScriptState, folder: Path) -> None:
        steps = LiveSteps(folder)
        with contextlib.suppress(Exception):  # what is shown meanwhile must not end the profile
            while True:
                state.live = await asyncio.to_thread(steps.look)
                self._live(state)
                await asyncio.sleep(_LIVE_S)

    async def _estimate(
        self,
        state: ScriptState,
        work: ScriptWork,
        texts: Mapping[Path, str],
        stop: threading.Event,
    ) -> None:
        costs, failed = None, None
        if state.measured is None:
            return
        measured = state.measured.costs
        try:
            costs = await asyncio.to_thread(self._room.estimate, work, texts, measured, stop)
        except Exception as error:
            failed = f"no estimate: {_why(error)}"
        if not stop.is_set():
            state.set_estimate(costs, failed)
            self._changed(state)

    async def _look(self, state: ScriptState, roots: list[Path], stop: threading.Event) -> None:
        runs = await asyncio.to_thread(find_runs, state.script, roots)
        shown = state.measured.costs.run if state.measured is not None else None
        for run in runs[:_MOST_TRIED]:
            if shown is not None and run == Path(shown):
                return
            try:
                measured = await asyncio.to_thread(self._room.read, run, state.script, stop)
            except (StepscopeError, StoppedError):
                continue
            now = state.measured.costs.run if state.measured is not None else None
            if now == shown:  # no profile has ended meanwhile
                state.set_measured(measured)
                self._changed(state)
            return


def _why(error: Exception) -> str:
    if isinstance(error, StoppedError):
        return _STOPPED
    if isinstance(error, StepscopeError):
        return str(error)
    return f"a defect in stepscope: {type(error).__name__}: {error}"


def _profile(state: ScriptState) -> str:
    return f"profile {state.script}"


def _estimate(state: ScriptState) -> str:
    return f"estimate {state.script}"


# What takes long, behind plain calls: each blocks its thread, and does the work in a child.

READ_LIMIT_S = 120.0
_LOOK_S = 0.2
_LAST_CHARACTERS = 300


class StoppedError(Exception):
    """Somebody asked for it, or newer work replaces this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptWork:
    """One script, as it is to be run."""

    script: Path
    arguments: tuple[str, ...]
    settings: EditorSettings


class _Answer(msgspec.Struct, frozen=True):
    run: MeasuredRun | None = None
    failed: str | None = None


class WorkRoom:
    """The real one; tests use others."""

    def profile(self, work: ScriptWork, folder: Path, stop: threading.Event) -> ProfiledScript:
        """Train for a few steps in a child, into `folder`."""
        from stepscope.ui.editor.profile_child import profile_script

        return profile_script(
            work.script,
            work.arguments,
            limit_s=work.settings.limit_s,
            folder=folder,
            python=work.settings.python,
            stop=stop,
        )

    def estimate(
        self,
        work: ScriptWork,
        texts: Mapping[Path, str],
        measured: LineCosts,
        stop: threading.Event,
    ) -> LineCosts:
        """Return what the edited lines will cost, without training; StepscopeError says why not."""
        from stepscope.ui.editor.line_costs import estimate_script

        return estimate_script(
            work.script,
            texts,
            work.arguments,
            limit_s=work.settings.limit_s,
            measured=measured,
            python=work.settings.python,
            stop=stop,
        )

    def read(self, run: Path, script: Path, stop: threading.Event) -> MeasuredRun:
        """NotCapturedError if the run does not tell what lines cost."""
        command = own_python("stepscope.ui.lsp.measured_run", str(run), str(script))
        output, errors = _run_child(command, f"{run} took too long to read", stop)
        try:
            answer = msgspec.json.decode(output, type=_Answer)
        except msgspec.DecodeError:
            raise NotCapturedError(f"{run} could not be read: {errors}") from None
        if answer.run is None:
            raise NotCapturedError(answer.failed or f"{run} could not be read")
        return answer.run

    def write_report(self, run: Path, report: Path, stop: threading.Event) -> None:
        """NotCapturedError if it cannot be written."""
        command = own_python("stepscope", "explain", str(run), "--html", str(report))
        _, errors = _run_child(command, f"the report of {run} took too long", stop)
        if not report.is_file():
            raise NotCapturedError(f"the report of {run} could not be written: {errors}")

    def close(self) -> None:
        """End what waits for more work."""
        from stepscope.ui.editor.fake_run import end_warm_pythons

        end_warm_pythons()


def _run_child(command: list[str], too_long: str, stop: threading.Event) -> tuple[bytes, str]:
    """Its output, and the end of what it said on stderr."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        try:
            output, errors = _await_end(child, too_long, stop)
        finally:
            kill_group(child.pid)  # its workers too
    return output, errors.decode(errors="replace").strip()[-_LAST_CHARACTERS:]


def _await_end(
    child: subprocess.Popen[bytes], too_long: str, stop: threading.Event
) -> tuple[bytes, bytes]:
    until = time.monotonic() + READ_LIMIT_S
    while True:
        try:
            return child.communicate(timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            if stop.is_set():
                raise StoppedError from None
            if time.monotonic() > until:
                raise NotCapturedError(too_long) from None


# How far a training is that a profile has started, read from its run folder.


class LiveSteps:
    """Reads what was added since the last look."""

    def __init__(self, folder: Path) -> None:
        from stepscope.trace.run_folder.follow_run import (
            RunFollower,  # it needs numpy: the server starts first
        )

        self._follower = RunFollower(folder)

    def look(self) -> LiveStep:
        """Return the steps of the rank that is furthest."""
        try:
            ranks = self._follower.read().ranks
        except StepscopeError:
            ranks = ()
        steps = max((rank.steps for rank in ranks), key=lambda one: one.seen, default=None)
        if steps is None or not steps.seen:
            return LiveStep(step=0, step_ms=None, message="starting up")
        step_ms = steps.whole_ns / steps.whole / 1e6 if steps.whole else None
        return LiveStep(step=steps.seen, step_ms=step_ms, message="training")


# Run folders of a script: found by their command, claimed so that two servers never share one.

_MOST_LOOKED_AT = 200  # the newest, in each home
_KEPT = 10  # runs that editors made of one script
_SUFFIX = "-editor"
_MADE_HERE = re.compile(rf"\d{{8}}-\d{{6}}-(.*){_SUFFIX}-\d+(?:-\d+)?")


def new_editor_run(script: Path) -> Path:
    """Return the path of a new run beside the script, which nothing has yet; the profile makes it.

    Two servers have two process numbers. OSError if nothing can be written there.
    """
    home = script.parent / HOME
    home.mkdir(exist_ok=True)  # a script that was never saved may have no folder either
    if not os.access(home, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(home))
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", script.stem)[:40]
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}{_SUFFIX}-{os.getpid()}"
    names = (base if number == 1 else f"{base}-{number}" for number in count(1))
    return next(path for name in names if not (path := home / name).exists())


def discard_run(folder: Path) -> None:
    """Remove a folder that `new_editor_run` made and that nobody needs."""
    shutil.rmtree(folder, ignore_errors=True)


def discard_old_runs(newest: Path) -> None:
    """Profiling at every save must not fill the disk: keep the last few of those made here."""
    with contextlib.suppress(OSError):
        runs = [run for run in newest.parent.iterdir() if _stem(run) == _stem(newest)]
        for run in sorted(runs, key=_age_key, reverse=True)[_KEPT:]:
            discard_run(run)


def _stem(run: Path) -> str | None:
    """Return the script's name; None for a run that no editor made."""
    match = _MADE_HERE.fullmatch(run.name)
    return match[1] if match else None


def find_runs(script: Path, roots: Iterable[Path]) -> list[Path]:
    """Finished runs of this script beside it and in the workspace's roots, newest first."""
    runs = []
    for home in dict.fromkeys((script.parent / HOME, *(root / HOME for root in roots))):
        with contextlib.suppress(StepscopeError, OSError):
            folders = [one for one in list_folder(home) if may_exist(one / RUN)]
            folders.sort(key=_age_key, reverse=True)
            runs += [one for one in folders[:_MOST_LOOKED_AT] if _is_of(one, script)]
    return sorted(runs, key=_age_key, reverse=True)


def _age_key(run: Path) -> tuple[float, str]:
    try:
        return (run / RUN).stat().st_mtime, run.name
    except OSError:
        return 0.0, run.name


def _is_of(run: Path, script: Path) -> bool:
    origin = read_origin(run)
    if origin is None or not any(run.glob("rank-*")):
        return False
    return _script_of(origin.command, origin.folder) == script


def _script_of(command: Sequence[str], folder: str | None) -> Path | None:
    named = next((word for word in command if word.endswith(".py")), None)
    if named is None:
        return None
    try:
        return (Path(folder or ".") / named).resolve()
    except (OSError, ValueError):
        return None
