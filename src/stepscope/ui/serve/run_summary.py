"""One run folder in a row of the list, from its small files.

This is the worker's work: a folder may hold a million steps or a thousand ranks.
"""

from __future__ import annotations

import html
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from stepscope.errors import StepscopeError, UnreadableInputError
from stepscope.records.limits import Ranks  # noqa: TC001  (decoded at run time)
from stepscope.records.words import plural
from stepscope.trace.decode import Oddities
from stepscope.trace.failures import find_failure
from stepscope.trace.regular_files import may_exist, read_start
from stepscope.trace.run_state import RUN, run_notes
from stepscope.trace.side_files import read_record
from stepscope.trace.tune_files import read_tune
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.verify.runs import ComparedRun

_MOST_BYTES = 64 << 20  # of run.json, which lists every rank
_TITLE_BYTES = 8192
_TITLE = re.compile(r"<title>(.*?) · stepscope</title>", re.DOTALL)
_MOST_TEXT = 2000
_YEAR_5000 = 9.6e10
REPORT = "report.html"
RUNNING, FINISHED, FAILED, OPEN, BROKEN = "running", "finished", "failed", "not closed", "broken"


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the list says about a folder. None is not known."""

    state: str
    script: str | None = None  # its path, as far as it is known
    command: str = ""
    started_unix: float | None = None
    device: str | None = None
    world_size: int | None = None
    step_ms: float | None = None  # the mean of the steady steps, as `compare` takes it
    low_ms: float | None = None
    high_ms: float | None = None
    steps: int | None = None
    peak_bytes: int | None = None
    mfu: float | None = None
    verdict: str | None = None
    problem: str | None = None


class _RunJson(msgspec.Struct, frozen=True, kw_only=True):
    command: list[str] | None = None
    folder: str | None = None
    started_unix: Annotated[float, msgspec.Meta(ge=0, lt=_YEAR_5000)] | None = None
    exit_code: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 32)] | None = None
    world_size: Ranks | None = None


def summarise(folder: Path, kind: str) -> RunSummary:
    """From small files alone; what is wrong with the folder is in the summary."""
    try:
        return _summarise_tune(folder) if kind == "tune" else _summarise_run(folder)
    except StepscopeError as error:
        return RunSummary(state=BROKEN, problem=short_text(str(error)))


def _summarise_tune(folder: Path) -> RunSummary:
    from stepscope.ui.tune_words import tune_answer

    result = read_tune(folder)
    return RunSummary(
        state=FINISHED,
        script=script_path(result.command, result.folder or None),
        command=short_text(shlex.join(result.command)),
        started_unix=_written(folder),
        step_ms=result.baseline_ms,
        low_ms=result.baseline_low_ms,
        high_ms=result.baseline_high_ms,
        verdict=short_text(tune_answer(result, folder).verdict),
    )


def _summarise_run(folder: Path) -> RunSummary:
    oddities = Oddities(RUN)
    run = read_record(folder / RUN, _RunJson, oddities, _MOST_BYTES)
    is_damaged = run is None and may_exist(folder / RUN)
    run = run or _RunJson()
    state, problem = _state(folder, run)
    if is_damaged:
        state, problem = BROKEN, f"{RUN} cannot be read: damaged, or only half written"
    measured, why = _measured(folder)
    if state == FINISHED and run.exit_code is None and measured is None:
        state, problem = BROKEN, f"holds no step and does not say how it ended: {why}"
    facts = measured.facts if measured else {}
    low, mean, high = _mean_step(measured)
    return RunSummary(
        state=state,
        script=script_path(run.command or facts.get("argv") or (), run.folder),
        command=short_text(shlex.join(run.command or ())),
        started_unix=run.started_unix or _written(folder),
        device=device_words(facts["device"]) if "device" in facts else None,
        world_size=run.world_size or facts.get("world_size"),
        step_ms=mean,
        low_ms=low,
        high_ms=high,
        steps=len(measured.step_ms) if measured and len(measured.step_ms) else None,
        peak_bytes=measured.peak_bytes if measured else None,
        verdict=_kept_verdict(folder),
        problem=problem or why,
    )


def _state(folder: Path, run: _RunJson) -> tuple[str, str | None]:
    notes = {note.id: note.detail for note in run_notes(folder)}
    if "still-running" in notes:
        return RUNNING, None
    if run.exit_code:
        failed = find_failure(folder, run.exit_code)
        return FAILED, short_text(f"the command failed: {failed.words}") if failed else None
    if "not-closed" in notes:
        return OPEN, short_text(notes["not-closed"])
    return FINISHED, None


def _measured(folder: Path) -> tuple[ComparedRun | None, str | None]:
    """The steps as `compare` reads them, or why there are none."""
    from stepscope.verify.runs import find_runs

    try:
        return find_runs(str(folder))[0], None
    except StepscopeError as error:
        return None, short_text(str(error))


def _mean_step(run: ComparedRun | None) -> tuple[float | None, float | None, float | None]:
    """Low, mean and high of the steady steps; None where no step was measured."""
    if run is None or run.columns is None:
        return None, None, None
    from stepscope.explain.whole_run.steady import find_steady
    from stepscope.verify.mean_change import mean_spread
    from stepscope.verify.student import student_quantile

    steady, _ = find_steady(run.columns)
    values = run.columns.step_ns[steady] / 1e6
    if len(values) < 2:
        return None, float(values.mean()) if len(values) else None, None
    spread = mean_spread(values)
    reach = student_quantile(spread.freedom, 0.975) * spread.deviation
    return max(0.0, spread.value - reach), spread.value, spread.value + reach


def device_words(device: object) -> str:
    """rank.json has null for a training on the CPU."""
    if isinstance(device, dict):
        device = device.get("name")
    return one_line(device)[:80] if isinstance(device, str) and device else "CPU"


def _kept_verdict(folder: Path) -> str | None:
    """The title of the report that `stepscope run` left: text only, the page is never served."""
    try:
        start = read_start(folder / REPORT, _TITLE_BYTES).decode("utf-8", "replace")
    except UnreadableInputError:
        return None
    title = _TITLE.search(start)
    return short_text(html.unescape(title[1])) if title else None


def script_path(command: Sequence[str], folder: str | None) -> str | None:
    """The script of a command as one path, so that runs from different folders are told apart."""
    script = next((word for word in command if word.endswith(".py")), None)
    if script is None and "-m" in command[:-1]:
        script = command[command.index("-m") + 1]
    if script is None:
        return None
    whole = str(Path(folder) / script) if folder and script.endswith(".py") else script
    return short_text(whole)


def _written(folder: Path) -> float | None:
    try:
        return folder.stat().st_mtime
    except (OSError, ValueError):
        return None


def short_text(text: str) -> str:
    line = one_line(text)
    if len(line) <= _MOST_TEXT:
        return line
    left = len(line) - _MOST_TEXT
    return f"{line[:_MOST_TEXT]}… ({left} more {plural(left, 'character')})"
