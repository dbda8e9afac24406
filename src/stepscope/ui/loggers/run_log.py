"""Follow a run folder in a thread and log it. Whatever fails is said once; training goes on."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from stepscope.errors import StepscopeError
from stepscope.trace.follow_run import RunFollower
from stepscope.ui.loggers.conclusion import conclude
from stepscope.ui.loggers.step_points import StepPoints
from stepscope.ui.say import say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from stepscope.records.explanation import Explanation
    from stepscope.ui.loggers.metric_log import LogChoice, MetricLog

_LOOK_S = 5.0
_REST = 99  # times as long as a look took: at most 1% of a core
_LONGEST_END_S = 60.0  # that the end of a run waits for the loggers


def begin_log(folder: Path, choices: Sequence[LogChoice]) -> RunLog | None:
    """None, and a line that says why, if it cannot be: nothing here may stop a training."""
    try:
        return RunLog(folder, choices)
    except Exception as error:
        say(f"nothing is logged: {type(error).__name__}: {error}; the training goes on")
        return None


class RunLog:
    """The loggers of one run, from its start to its end."""

    def __init__(self, folder: Path, choices: Sequence[LogChoice]) -> None:
        """Call in the thread that trains, where a run of the user's own may be open. Loggers are
        opened in our thread: their packages take seconds to import."""
        self._folder = folder
        self._choices = [(choice, choice.find_open_run()) for choice in choices]
        self._logs: dict[str, MetricLog] = {}
        self._follower = RunFollower(folder)
        self._points = StepPoints()
        self._over = threading.Event()
        self._explained: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._follow, name="stepscope-log", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether any logger is still in use, or may yet be."""
        return self._thread.is_alive()

    def conclude(self, explanation: Explanation | None) -> None:
        """The run is over and, if it could be, explained. Nothing here may change an exit code."""
        explained = None
        try:
            if explanation is not None:
                from stepscope.ui.contract import explanation_json

                explained = explanation_json(explanation)
        except Exception as error:
            say(f"the run is logged without a verdict: {type(error).__name__}: {error}")
        self.end(explained)

    def end(self, explained: dict[str, Any] | None) -> None:
        """The run is over; `explained` is what `explain --json` says of it, if it could be."""
        self._explained = explained
        self._over.set()
        self._thread.join(_LONGEST_END_S)
        if self._thread.is_alive():
            names = ", ".join(str(choice) for choice, _ in self._choices)
            say(f"{names}: still busy {_LONGEST_END_S:g} s after the run; stepscope stops waiting")

    def _open(self, choice: LogChoice, joined: Any) -> None:
        try:
            self._logs[str(choice)] = choice.connect(self._folder, joined)
        except ModuleNotFoundError as error:
            missing = (error.name or choice.kind).partition(".")[0]
            raise StepscopeError(f"{missing} is not installed: pip install {missing}") from None

    def _follow(self) -> None:
        for choice, joined in self._choices:
            self._try(str(choice), partial(self._open, choice, joined))
        rest = _LOOK_S
        while self._logs and not self._over.wait(rest):
            began = time.monotonic()
            self._log_steps()
            rest = max(_LOOK_S, _REST * (time.monotonic() - began))
        self._log_steps(all_ended=True)
        if self._explained is not None:
            conclusion, step = conclude(self._explained), self._points.last_step
            self._each(lambda log: log.conclude(conclusion, step))
        self._each(lambda log: log.close())

    def _log_steps(self, *, all_ended: bool = False) -> None:
        """The steps of the lowest rank; the folder may not be there yet, or be gone."""
        try:
            ranks = self._follower.read().ranks
        except StepscopeError:
            return
        if not ranks:
            return
        lowest = min(ranks, key=lambda rank: (rank.rank, -rank.attempt))
        points = self._points.take(lowest.steps.recent, all_ended=all_ended)
        if points:
            self._each(lambda log: log.points(points))

    def _each(self, act: Callable[[MetricLog], None]) -> None:
        for name, log in list(self._logs.items()):
            self._try(name, partial(act, log))

    def _try(self, name: str, act: Callable[[], None]) -> None:
        """A logger that fails is left out from then on."""
        try:
            act()
        except Exception as error:
            self._logs.pop(name, None)
            kind = "" if isinstance(error, StepscopeError) else f"{type(error).__name__}: "
            first = str(error).strip().split("\n")[0].partition(". ")[0]
            say(f"nothing more is logged to {name}: {kind}{first}; the training goes on")
