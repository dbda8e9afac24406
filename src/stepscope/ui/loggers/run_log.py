"""Follow a run folder in a thread and log it: steps as points, the verdict at the end.

Whatever fails is said once; training goes on.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stepscope.errors import StepscopeError, UsageError
from stepscope.records.rank import StepColumns
from stepscope.text.figures import percent
from stepscope.text.words import finding_page, lazy_pattern
from stepscope.trace.run_folder.follow_run import RunFollower
from stepscope.ui.say import say
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from stepscope.records.explanation import Explanation

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
                from stepscope.ui.topics.explanation_json import explanation_json

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


# Where metrics go. Everything here may fail: run_log.py catches it, and training goes on.

PREFIX = "stepscope"
# name on the command line -> its module, its class, and what `:...` after the name means
KINDS = {
    "tensorboard": ("tensorboard", "TensorBoardLog", "DIR"),
    "mlflow": ("mlflow", "MlflowLog", "EXPERIMENT"),
    "wandb": ("wandb", "WandbLog", "PROJECT"),
}


class MetricPoint(NamedTuple):
    """Values at one step of the training."""

    step: int
    unix_s: float
    values: Mapping[str, float]


class RunConclusion(NamedTuple):
    """What is known once the run is explained."""

    values: Mapping[str, float]
    verdict: str  # plain text, one line
    text: str  # verdict, next step and findings as Markdown


class MetricLog(ABC):
    """One place that metrics are logged to; used by one thread."""

    @abstractmethod
    def points(self, points: Sequence[MetricPoint]) -> None:
        """Log values by step; names begin with `stepscope/`."""

    @abstractmethod
    def conclude(self, conclusion: RunConclusion, step: int) -> None:
        """Log the run's final figures, the verdict and the findings; `step` is the last one."""

    @abstractmethod
    def close(self) -> None:
        """Write what is still to be written; a run that was open before stays open."""


class LogChoice(NamedTuple):
    """A logger as the user names it: `tensorboard:runs/mine`."""

    kind: str
    target: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.target}" if self.target else self.kind

    @classmethod
    def parse(cls, text: str) -> LogChoice:
        """UsageError for a logger that there is not."""
        kind, _, target = text.partition(":")
        if kind not in KINDS:
            known = ", ".join(f"{name}[:{word}]" for name, (_, _, word) in KINDS.items())
            raise UsageError(f"--log {text}: there is no logger {kind!r}; choose from {known}")
        return cls(kind, target)

    def find_open_run(self) -> Any:
        """The run of the user's own that is open in this thread, or None. Imports nothing."""
        if self.kind == "mlflow":
            active = getattr(sys.modules.get("mlflow"), "active_run", lambda: None)()
            return active.info.run_id if active is not None else None
        return getattr(sys.modules.get(self.kind), "run", None) if self.kind == "wandb" else None

    def connect(self, run: Path, joined: Any) -> MetricLog:
        """`joined` is the run of the user's own, if there is one. Imports the package: slow."""
        module, name, _ = KINDS[self.kind]
        kind = getattr(import_module(f"stepscope.ui.loggers.{module}"), name)
        log: MetricLog = kind(self.target, run, joined)
        return log


# Steps as points along the run: means over short stretches that grow with the run.
#
# A stretch is 2 s long at first, and 1/500 of the run so far later on, so that a week has some
# thousand points. Profiled steps and the memory step do not count for step times.

_SHORTEST_NS = 2_000_000_000
_OF_THE_RUN = 500


class StepPoints:
    """Called with the steps so far, again and again; each step counts in one point."""

    def __init__(self) -> None:
        self._last_step = -1  # that a point has counted
        self._began_ns: int | None = None

    @property
    def last_step(self) -> int:
        return max(self._last_step, 0)

    def take(self, steps: StepColumns, *, all_ended: bool = False) -> list[MetricPoint]:
        """Points for stretches that are over, or for all when the run is."""
        new = np.flatnonzero(steps.number > self._last_step)
        if not len(new):
            return []
        ends = steps.end_unix_ns[new]
        first_begins = int(ends[0] - steps.wall_ns[new[0]])
        if self._began_ns is None:
            self._began_ns = first_begins
        points, at = [], 0
        while at < len(new):
            begins = int(ends[at] - steps.wall_ns[new[at]])
            edge = begins + max(_SHORTEST_NS, (begins - self._began_ns) // _OF_THE_RUN)
            until = max(at + 1, int(np.searchsorted(ends, edge, side="right")))
            if until == len(new) and not all_ended:
                break  # more steps may belong to it
            points.append(_point(steps, new[at:until]))
            self._last_step = points[-1].step
            at = until
        return points


def _point(steps: StepColumns, rows: np.ndarray[tuple[int], np.dtype[np.intp]]) -> MetricPoint:
    last = int(rows[-1])
    wall_s = float(steps.wall_ns[rows].sum()) / 1e9
    values = {"steps_per_s": len(rows) / wall_s} if wall_s > 0 else {}
    plain = rows[steps.plain[rows]]
    if len(plain):
        own_ms = steps.step_ns[plain] / 1e6
        values |= {"step_ms": float(own_ms.mean()), "slowest_step_ms": float(own_ms.max())}
        for phase, column in steps.phases_ns.items():
            values[f"phase/{phase}_ms"] = float(column[plain].mean()) / 1e6
    if steps.allocated_bytes is not None:
        known = steps.allocated_bytes[rows]
        known = known[known >= 0]
        if len(known):
            values["memory_bytes"] = float(known[-1])
    named = {f"{PREFIX}/{name}": value for name, value in values.items()}
    return MetricPoint(int(steps.number[last]), float(steps.end_unix_ns[last]) / 1e9, named)


# What `explain --json` says, as values and a text for a dashboard.

_MOST_FINDINGS = 10
_MARKUP = lazy_pattern(r"[\\`*_\[\]<>|#&]")


def conclude(explained: dict[str, Any]) -> RunConclusion:
    """Figures that are not known are left out."""
    verdict = one_line(explained["verdict"])
    return RunConclusion(_values(explained), verdict, _text(explained))


def _values(explained: dict[str, Any]) -> dict[str, float]:
    budget = explained["budget"]
    values: dict[str, float | None] = {"run/step_ms": budget["step_ms"]}
    for part in budget["parts"]:
        values[f"budget/{part['id']}_ms"] = part["ms"]
        values[f"budget/{part['id']}_share"] = part["share"]
    for finding in explained["findings"]:
        values[f"finding/{finding['id']}"] = finding["share"]
    rank: dict[str, Any] = next(iter(explained["ranks"]), {})
    values["run/mfu"] = (rank.get("efficiency") or {}).get("mfu")
    values["run/peak_bytes"] = (rank.get("memory") or {}).get("peak_bytes")
    return {f"{PREFIX}/{name}": float(v) for name, v in values.items() if v is not None}


def _text(explained: dict[str, Any]) -> str:
    """The verdict is the first line."""
    lines = [_plain(explained["verdict"]), ""]
    for name in ("why", "next"):
        if explained.get(name):
            lines += [f"**{name}** {_plain(explained[name])}", ""]
    for finding in explained["findings"][:_MOST_FINDINGS]:
        share = f"{percent(finding['share'])} " if finding["share"] else ""
        page = f" ([{finding['id']}]({finding_page(finding['id'])}))"
        lines.append(f"- {share}{_plain(finding['summary'])}{page}")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Names from a trace are text: no markup, no line breaks."""
    return _MARKUP.sub(lambda sign: f"&#{ord(sign[0])};", " ".join(text.split()))
