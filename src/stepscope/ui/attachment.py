"""Whether capture found the training: what to say while the command runs, and why nothing came.

Everything is read from the run folder: the files of its hosts, which every Python process of the
job writes to, and the ranks' steps.jsonl.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.measure import folder as layout
from stepscope.measure.processes import BACKWARD, FORKED, STARTED, STEP, TORCH
from stepscope.measure.schedule import Schedule
from stepscope.records.addresses import SITE
from stepscope.records.host_names import processes_files
from stepscope.records.limits import StepNumber  # noqa: TC001  (decoded at run time)
from stepscope.records.words import counted
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.regular_files import LineFile, read_tail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.measure.settings import Settings

_NOT_LOADED_AFTER_S = 20.0  # Python processes usually start at once
_NO_STEP_AFTER_S = 4.0  # after the first backward pass
_SETTLED_AFTER_S = 2.0  # after the first step: by then all ranks have a few steps
_LAST_BYTES = 4096  # of a list of steps
_MOST_LOOKED_AT = 64  # hosts, and ranks: of thousands these tell enough
# Options with which Python ignores PYTHONPATH or the start-up file.
_ISOLATING = re.compile(r"-[a-zA-Z]*[IES][a-zA-Z]*$")
_PYTHON = re.compile(r"(python|pypy)[\d.]*$")
_RAY_CLUSTER = Path("/tmp/ray/ray_current_cluster")  # Ray notes there where it runs
_MPIRUN = ("mpirun", "mpiexec", "orterun")
_OTHERWISE = "run `python -m stepscope run -- train.py`, or call stepscope.watch() in the script"


class _Process(msgspec.Struct):
    event: str


class _Step(msgspec.Struct):
    step: StepNumber


def isolating_option(command: Sequence[str]) -> str | None:
    """The option that keeps stepscope out, as in `python -I train.py`."""
    for place, word in enumerate(command):
        if not _PYTHON.match(Path(word).name):
            continue
        for option in command[place + 1 :]:
            if not option.startswith("-") or option in ("-m", "-c", "-"):
                break
            if _ISOLATING.match(option):
                return f"{Path(word).name} {option}"
    return None


@dataclass(slots=True)
class Attachment:
    """Watches the run folder while the command runs, and reports each thing once."""

    folder: Path
    settings: Settings
    command: tuple[str, ...]
    began: float = field(default_factory=time.monotonic)
    done: bool = False
    _passed: float | None = None  # time of the first backward pass
    _stepped: float | None = None  # time of the first step
    _warned: bool = False

    def news(self) -> str | None:
        """A sentence worth printing now, if there is one."""
        events = count_events(self.folder)
        now = time.monotonic()
        if events[STEP]:
            self._stepped = self._stepped or now
            return self._attached() if now - self._stepped >= _SETTLED_AFTER_S else None
        if events[BACKWARD]:
            self._passed = self._passed or now
        return None if self._warned else self._missing(events, now)

    def _missing(self, events: Counter[str], now: float) -> str | None:
        sentence = None
        if self._passed is not None and now - self._passed >= _NO_STEP_AFTER_S:
            sentence = (
                "backward passes run, but no optimizer step was seen, so stepscope cannot tell "
                f"where a step ends. {_flags(self.settings)}"
            )
        elif not events[STARTED] and now - self.began >= _NOT_LOADED_AFTER_S:
            sentence = _not_loaded(self.command)
        self._warned = sentence is not None
        return sentence

    def _attached(self) -> str | None:
        ranks = sorted(self.folder.glob("rank-*"))
        steps = max((steps_seen(rank) for rank in ranks[:_MOST_LOOKED_AT]), default=0)
        if not steps:
            return None
        self.done = True
        processes = counted(len(ranks), "process", "processes")
        seen = counted(steps, "step")
        return f"attached to {processes}: {seen} seen, {_window_words(self.settings, steps)}"


def _window_words(settings: Settings, steps: int) -> str:
    coming = [window for window in Schedule.plan(settings).windows if window.last >= steps]
    if not coming:
        return "the window is recorded"
    ranges = [
        str(window.last) if window.active == 1 else f"{window.first_active} to {window.last}"
        for window in coming
    ]
    if len(ranges) > 1:
        ranges[-2:] = [f"{ranges[-2]} and {ranges[-1]}"]
    return f"window at {'step' if ranges == [str(coming[0].last)] else 'steps'} {', '.join(ranges)}"


def count_events(folder: Path) -> Counter[str]:
    """How many processes reached each stage."""
    events: Counter[str] = Counter()
    for file in processes_files(folder, _MOST_LOOKED_AT):
        with contextlib.suppress(UnreadableInputError):
            for line in LineFile(file):
                with contextlib.suppress(NotJsonError):
                    events[decode(line.text, _Process).event] += 1
    return events


def steps_seen(rank: Path) -> int:
    """The number of steps in a rank's list, read from its end."""
    try:
        lines = read_tail(rank / layout.STEPS, _LAST_BYTES).splitlines()
    except UnreadableInputError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(NotJsonError):
            return decode(line, _Step).step + 1
    return 0


def why_nothing(folder: Path, settings: Settings, command: Sequence[str], code: int) -> str:
    """Why no training step was seen, and what to do about it."""
    events = count_events(folder)
    failed = f"the command failed (exit code {code})" if code else ""
    if events[FORKED]:
        return (
            "the script forked its training processes after it ran backward passes itself. "
            "stepscope cannot capture such processes. Fork them earlier, or start them with "
            'torch.multiprocessing.get_context("spawn") or with torchrun'
        )
    if events[BACKWARD]:
        if failed:
            return f"{failed} before a training step ended"
        return (
            "backward passes ran, but no optimizer step was seen, so stepscope cannot tell where a "
            f"step ends. {_flags(settings)}"
        )
    if events[TORCH]:
        if failed:
            return f"{failed} after it imported torch and before its first backward pass"
        return (
            "torch was imported, but no backward pass was seen. Either this command does not "
            "train, or torch.compile holds the whole step. In that case call stepscope.watch() in "
            f"the script{_ray_words()}"
        )
    if events[STARTED]:
        if failed:
            return f"{failed} before it imported torch"
        return (
            "no Python process that loaded stepscope imported torch. If a launcher or a container "
            f"starts the training with another PYTHONPATH, {_OTHERWISE}{_ray_words()}"
        )
    return f"{failed}; {_not_loaded(command)}" if failed else _not_loaded(command)


def _ray_words() -> str:
    """Workers of a cluster that is there inherit nothing from the command."""
    if not os.environ.get("RAY_ADDRESS") and not _RAY_CLUSTER.is_file():
        return ""
    return (
        ". If the training runs on an existing Ray cluster, use stepscope.ray.capture() "
        f"({SITE}/how-to/clusters/)"
    )


def _flags(settings: Settings) -> str:
    others = [kind for kind in ("backward", "dataloader", "forward") if kind != settings.step_on]
    return f"Name what ends a step: --step-on {', '.join(others[:-1])} or {others[-1]}"


def _not_loaded(command: Sequence[str]) -> str:
    option = isolating_option(command)
    if option:
        return (
            f"stepscope was not loaded, because `{option}` ignores PYTHONPATH. Remove that option, "
            "or call stepscope.watch() in the script"
        )
    if any(Path(word).name in _MPIRUN for word in command):
        return (
            "stepscope did not get into any Python process: Open MPI does not pass environment "
            "variables to other hosts. Use `mpirun -x STEPSCOPE_CAPTURE -x PYTHONPATH ...`, or "
            "start stepscope there: `mpirun ... stepscope run -- python train.py`"
        )
    return (
        "stepscope did not get into any Python process. Either the command is not Python, or its "
        f"launcher resets PYTHONPATH. If it is Python, {_OTHERWISE}"
    )


def why_no_trace(facts: dict[str, Any], settings: Settings, code: int | None = None) -> str:
    """Why a rank that trained has no trace."""
    problems = [str(problem) for problem in facts.get("problems") or ()]
    problem = next((p for p in problems if p.startswith(("window", "saving"))), None)
    status = facts.get("status")
    if status == "unreadable":
        return problems[0] if problems else f"its {layout.RANK} could not be read"
    if status == "running":
        return problem or _unclosed(code)
    steps = facts.get("steps", 0)
    first = Schedule.plan(settings).windows[0].first_active
    if steps <= first:
        seen = f"{counted(steps, 'step')} {'was' if steps == 1 else 'were'} seen"
        return f"only {seen}; a trace needs at least {first + 1}"
    return problem or "; ".join(problems) or "not known"


def _unclosed(code: int | None) -> str:
    """The exit code may be a launcher's, which reports its ranks in its own way."""
    killed = code is not None and code > 128 and code - 128 in set(signal.Signals)
    if killed and code is not None:
        return (
            f"the process ended without closing: {signal.Signals(code - 128).name} ended the "
            "command"
        )
    return "the process ended without closing (killed, os._exit or a crash)"
