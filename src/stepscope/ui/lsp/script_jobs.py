"""Profiles and estimates: at most one of each a script at a time, and the newest request wins.

Everything here runs on the server's loop; the work itself blocks threads that wait for children.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import NotCapturedError, StepscopeError
from stepscope.ui.lsp.live_steps import LiveSteps
from stepscope.ui.lsp.run_homes import discard_old_runs, discard_run, find_runs, new_editor_run
from stepscope.ui.lsp.work_room import StoppedError

if TYPE_CHECKING:
    from stepscope.ui.lsp.script_state import ScriptState
    from stepscope.ui.lsp.work_room import ScriptWork, WorkRoom

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
        """Whether there was anything to stop."""
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
        """The path of the report, written first if it is not there."""
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
        """Whether there is a run to read."""
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
