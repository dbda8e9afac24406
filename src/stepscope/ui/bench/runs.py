"""One run of a workload under capture: its steady steps, its losses, and why it failed if it did.

The first run of a row also records a trace and measures memory, in its last steps: what the
profiler leaves behind in the process then slows no step that counts.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from stepscope.bench.captured_steps import captured_per_step, whole_steps
from stepscope.bench.computing_and_waiting import RunParts, StepParts, mean_parts
from stepscope.errors import StepscopeError, UnreadableInputError
from stepscope.measure import folder as layout
from stepscope.measure.settings import Settings
from stepscope.records.words import counted
from stepscope.trace.regular_files import read_whole
from stepscope.ui.bench.command import training_command
from stepscope.ui.captured_command import NEVER, capture_to_end
from stepscope.ui.command_to_end import last_lines
from stepscope.verify.runs import find_runs
from stepscope.verify.trial_steps import FEWEST_STEPS, steady_steps

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from stepscope.bench.task import BenchTask
    from stepscope.ui.command_to_end import CommandEnd

    Floats = NDArray[np.float64]

LOSSES = "losses.json"
PACED_S = 2.0  # of steps and yardsticks in a paced run
_MOST_LOSSES_BYTES = 64 << 20
_WARMUP, _ACTIVE = 2, 3  # of the window
_AFTER_WINDOW = 4  # a plain step, the memory step, and two more so that its end is seen
_SIGNALS = 128
_READ_LINES = 200
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception|Interrupt)\b.*)")
_LAUNCHERS_OWN = "ChildFailedError"


class TrainedLosses(msgspec.Struct, frozen=True, kw_only=True):
    """losses.json, as bench/train.py writes it; None for a loss that is no finite number."""

    losses: tuple[float | None, ...] = ()
    calibration_ms: float | None = None  # the machine's pace before the run
    parts: StepParts | None = None  # of each step; None where the system does not count
    step_over_yardstick: float | None = None  # of a paced run, which has nothing else
    computing_over_yardstick: float | None = None  # the same by processor time


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """One start of a row's command."""

    number: int
    folder: Path
    seconds: float
    failed: str | None = None
    steps_ms: Floats = field(default_factory=lambda: np.empty(0))  # steady ones, in order
    captured_per_step: float = 1.0  # steps that capture saw, for each of the workload's
    losses: tuple[float | None, ...] = ()
    calibration_ms: float | None = None
    parts: RunParts | None = None  # of the mean steady step
    notes: tuple[str, ...] = ()  # remedies that were not applied, and why


def run_once(task: BenchTask, number: int, home: Path) -> BenchRun:
    """The first run (1) has a trace and memory. A run that fails is an answer too."""
    folder = home / f"{_safe(task.name)}-{number}"
    settings = _settings(task, folder, window=number == 1)
    command = training_command(task, folder.absolute() / LOSSES)
    began = time.monotonic()
    known: dict[str, Any] = {"number": number, "folder": folder, "seconds": 0.0}
    try:
        end, ranks = capture_to_end(command, folder, settings)
        known["seconds"] = time.monotonic() - began
        failed = _why_failed(folder, end)
        return BenchRun(**known, failed=failed) if failed else _read(task, ranks, known)
    except StepscopeError as error:
        return BenchRun(**known, failed=str(error))
    except OSError as error:
        why = f"{folder} cannot be written: {layout.why_refused(error)}"
        return BenchRun(**known, failed=why)


class PacedRun(NamedTuple):
    """A run's step over a yardstick that is timed in turns with it."""

    step: float
    computing: float  # by processor time


def run_paced(task: BenchTask, number: int, home: Path) -> PacedRun | None:
    """None if it failed."""
    folder = home / f"{_safe(task.name)}-paced-{number}"
    command = training_command(task, folder.absolute() / LOSSES, PACED_S)
    try:
        end, _ = capture_to_end(command, folder, _settings(task, folder, window=False))
        trained = TrainedLosses() if end.code else read_losses(folder)
    except (StepscopeError, OSError):
        return None
    step, computing = trained.step_over_yardstick, trained.computing_over_yardstick
    return PacedRun(step, computing) if step and computing else None


def _settings(task: BenchTask, folder: Path, *, window: bool) -> Settings:
    return Settings(
        folder=str(folder.absolute()),
        wait=_wait(task) if window else NEVER,
        warmup=_WARMUP,
        active=_ACTIVE,
        memory=window,
        sample_hz=0.0,
        remedies=task.remedies,
    )


def _wait(task: BenchTask) -> int:
    return task.all_steps - _WARMUP - _ACTIVE - _AFTER_WINDOW


def _read(task: BenchTask, ranks: list[dict[str, Any]], known: dict[str, Any]) -> BenchRun:
    folder: Path = known["folder"]
    trained = read_losses(folder)
    seen = max((rank.get("steps") or 0 for rank in ranks), default=0)
    per_step = captured_per_step(seen, task.all_steps)
    run = find_runs(str(folder))[0]
    steps = whole_steps(steady_steps(run.step_ms), per_step)
    if len(steps) < FEWEST_STEPS:
        why = (
            f"only {counted(len(steps), 'steady step')} were measured, but {FEWEST_STEPS} are "
            "needed. Ask for more with --steps"
        )
        return BenchRun(**known, failed=why)
    return BenchRun(
        **known,
        steps_ms=steps,
        captured_per_step=per_step,
        losses=trained.losses,
        calibration_ms=trained.calibration_ms,
        parts=mean_parts(trained.parts, plain_steps(task, known["number"], per_step))
        if trained.parts is not None
        else None,
        notes=tuple(one.words for one in run.facts["remedies"] if one.outcome != "applied"),
    )


def plain_steps(task: BenchTask, number: int, per_step: float) -> int:
    """The workload's steps before the window, which is only in the first run and counts the steps
    that capture sees."""
    return int(_wait(task) / per_step) if number == 1 else task.all_steps


def read_losses(folder: Path) -> TrainedLosses:
    """UnreadableInputError without them."""
    content = read_whole(folder / LOSSES, _MOST_LOSSES_BYTES)
    try:
        return msgspec.json.decode(content, type=TrainedLosses)
    except msgspec.MsgspecError as error:
        raise UnreadableInputError(f"{folder / LOSSES}: {error}") from None


def _why_failed(folder: Path, end: CommandEnd) -> str | None:
    if not end.code:
        return None
    lines = [line for line in last_lines(folder, _READ_LINES) if line.strip()]
    errors = [match[1] for line in lines if (match := _ERROR.match(line))]
    raised = next((line for line in reversed(errors) if _LAUNCHERS_OWN not in line), None)
    if raised is not None:
        return raised
    if end.code > _SIGNALS:
        return f"it was ended by signal {end.code - _SIGNALS}"
    last = f": {lines[-1].strip()}" if lines else ""
    return f"it ended with exit code {end.code}{last}"


def _safe(name: str) -> str:
    return "".join(char if char.isalnum() or char in "+-=._" else "_" for char in name)[:80]
