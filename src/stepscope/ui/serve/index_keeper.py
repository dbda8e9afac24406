"""Keeps the index up to date in the background: look for changes, summarise, then explain."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import StepscopeError
from stepscope.ui.serve.path_text import text_of
from stepscope.ui.serve.run_summary import BROKEN, RUNNING, RunSummary
from stepscope.ui.serve.worker_process import WorkerError, WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.ui.serve.run_index import IndexedRun, RunIndex
    from stepscope.ui.serve.runs_directory import RunsDirectory

_LOOK_EVERY_S = 2.0
_REST = 10.0  # times as long as a look took, until the next one
_RUNNING_EVERY_S = 10.0  # a running run changes all the time: its row need not
SUMMARY_LIMIT_S = 30.0
EXPLAIN_LIMIT_S = 120.0


@dataclass(slots=True)
class IndexKeeper:
    """Two threads with a worker process each, of low priority for the machine's sake: traces may
    take minutes to read, and a run that has just started must not wait for them."""

    directory: RunsDirectory
    index: RunIndex
    worker: WorkerProcess = field(default_factory=lambda: WorkerProcess("--background"))
    explainer: WorkerProcess = field(default_factory=lambda: WorkerProcess("--background"))
    problem: str | None = None  # why the served folder cannot be read
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _refreshed: dict[str, float] = field(default_factory=dict)

    def start(self) -> None:
        self.directory.remember((run.id, run.path) for run in self.index.runs())
        self._threads = [
            threading.Thread(target=self._repeat, args=(work,), name=name, daemon=True)
            for name, work in (("index", self._keep_list), ("explain", self._explain_all))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        self.worker.close()
        self.explainer.close()
        for thread in self._threads:
            thread.join(10)

    def look(self) -> None:
        """Bring the list of folders up to date."""
        problem = None
        try:
            self.index.replace_folders(self.directory.scan(), self.directory.root)
        except StepscopeError as error:
            problem = str(error)
        self.problem = problem

    def summarise_changed(self) -> None:
        """Every folder that has changed."""
        for run in self.index.unsummarised():
            if self._stop.is_set():
                return
            if self._is_due(run):
                self._summarise(run)

    def explain_next(self) -> bool:
        """Read the traces of one run; False if there is none to read."""
        run = self.index.next_unexplained()
        if run is None or self._stop.is_set():
            return False
        try:
            answer = self.explainer.ask(EXPLAIN_LIMIT_S, job="explain", path=text_of(run.path))
            self.index.keep_explanation(run.id, run.stamp, _summary(answer))
        except StepscopeError as error:
            if not self._stop.is_set():
                self.index.keep_failure(run.id, run.stamp, f"not explained: {error}")
        return True

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._stop.is_set():
            try:
                work()
            except Exception as error:  # the list must go on, and say why it may be old
                self.problem = f"the list is not kept up to date: {error}"
                self._stop.wait(_LOOK_EVERY_S)

    def _keep_list(self) -> None:
        began = time.monotonic()
        self.look()
        took = time.monotonic() - began
        self.summarise_changed()
        again = began + max(_LOOK_EVERY_S, _REST * took)
        self._stop.wait(max(0.0, again - time.monotonic()))

    def _explain_all(self) -> None:
        while self.explain_next():
            pass
        self._stop.wait(_LOOK_EVERY_S)

    def _is_due(self, run: IndexedRun) -> bool:
        now = time.monotonic()
        last = self._refreshed.get(run.id)
        if run.state == RUNNING and last is not None and now - last < _RUNNING_EVERY_S:
            return False
        self._refreshed[run.id] = now
        return True

    def _summarise(self, run: IndexedRun) -> None:
        try:
            answer = self.worker.ask(
                SUMMARY_LIMIT_S, job="summarise", path=text_of(run.path), kind=run.kind
            )
            summary = _summary(answer)
        except WorkerError as error:
            if self._stop.is_set():
                return
            summary = RunSummary(state=BROKEN, problem=str(error))
        except (StepscopeError, msgspec.ValidationError) as error:
            summary = RunSummary(state=BROKEN, problem=str(error))
        try:
            self.index.keep_summary(run.id, run.stamp, summary)
        except (OverflowError, UnicodeEncodeError) as error:  # one folder must not stop the others
            broken = RunSummary(state=BROKEN, problem=f"holds a value that cannot be kept: {error}")
            self.index.keep_summary(run.id, run.stamp, broken)


def _summary(answer: object) -> RunSummary:
    return msgspec.convert(answer, RunSummary)
