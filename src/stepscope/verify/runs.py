"""What a path stands for: one run or several, each with its steps, phases and facts.

A job's step is its slowest rank's, as everywhere: the rank whose median step is longest. Ranks that
train in step all take equally long; where one does not, the job waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from stepscope.errors import NotCapturedError, UnreadableInputError
from stepscope.records.limits import Ranks  # noqa: TC001  (decoded at run time)
from stepscope.trace.decode import Oddities
from stepscope.trace.layout import is_trace_name
from stepscope.trace.measured_steps import PHASES, STEPS, plain_steps
from stepscope.trace.memory_file import read_captured
from stepscope.trace.rank_facts import RANK, rank_of_folder, read_facts
from stepscope.trace.regular_files import is_folder, is_there, names_in
from stepscope.trace.remote import is_url
from stepscope.trace.side_files import read_record
from stepscope.verify.step_lists import is_step_list, read_step_list

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.comparison import StepsAre
    from stepscope.records.explanation import Explanation
    from stepscope.trace.measured_steps import StepRow

    Floats = NDArray[np.float64]

RUN = "run.json"
_MOST_BYTES = 64 << 20  # of run.json, which lists every rank


class _WholeRun(msgspec.Struct, frozen=True, kw_only=True):
    """What run.json says of all ranks."""

    command: list[str] | None = None
    exit_code: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 32)] | None = None
    world_size: Ranks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run of one side. Steps are in the order they ran, in milliseconds."""

    path: str
    steps_are: StepsAre
    step_ms: Floats
    rank: int | None = None
    phases: dict[str, Floats] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # of rank.json, and run.json's command
    peak_bytes: int | None = None
    has_trace: bool = False
    notes: tuple[str, ...] = ()


def find_runs(path: str, *, unit: str = "ms", column: str | None = None) -> list[ComparedRun]:
    """One for a run folder, a step list, a trace or a folder of traces; more for a folder of runs.

    The steps of a trace are not read yet: `profiled_run` does that.
    """
    if is_url(path):
        return [_of_traces(path)]
    here = Path(path)
    if is_folder(here):
        return _in_folder(here)
    if not is_there(here):
        raise UnreadableInputError(f"{path} does not exist")
    if here.name == STEPS:
        return [_of_ranks(here.parent, [here.parent])]
    if is_step_list(here):
        steps = read_step_list(here, unit, column)
        return [ComparedRun(path=path, steps_are="listed", step_ms=steps)]
    return [_of_traces(path)]


def profiled_run(run: ComparedRun, explanation: Explanation) -> ComparedRun:
    """The same run with the steps of its trace: those of the rank that takes longest."""
    ranks = [rank for rank in explanation.ranks if rank.steps.cycles_ns or rank.steps.steps]
    if not ranks:
        raise NotCapturedError(f"{run.path}: the trace has no step")
    slowest = max(ranks, key=lambda rank: rank.step_ms.profiled or 0.0)
    cycles = slowest.steps.cycles_ns
    steps_ns = cycles if len(cycles) > 1 else [step.dur_ns for step in slowest.steps.steps]
    return ComparedRun(
        path=run.path,
        steps_are="profiled",
        step_ms=np.array(steps_ns, np.float64) / 1e6,
        rank=slowest.rank if len(explanation.ranks) > 1 else None,
        facts=run.facts,
        peak_bytes=run.peak_bytes,
        has_trace=True,
        notes=run.notes,
    )


def _in_folder(folder: Path) -> list[ComparedRun]:
    if is_there(folder / STEPS):
        return [_of_ranks(folder, [folder])]
    ranks = _rank_folders(folder)
    if ranks or is_there(folder / RUN):
        return [_of_ranks(folder, ranks)]
    inner = names_in(folder)
    runs = [each for each in inner if is_folder(each) and _rank_folders(each)]
    if runs and not any(is_trace_name(each.name) for each in inner):
        return [_of_ranks(each, _rank_folders(each)) for each in runs]
    return [_of_traces(str(folder))]


def _rank_folders(run: Path) -> list[Path]:
    """Without those of a second process that said it was the same rank (`rank-00000.2`)."""
    return [
        each
        for each in sorted(run.glob("rank-*"))
        if "." not in each.name
        and is_folder(each)
        and (is_there(each / STEPS) or is_there(each / RANK))
    ]


def _of_traces(path: str) -> ComparedRun:
    return ComparedRun(path=path, steps_are="profiled", step_ms=np.empty(0), has_trace=True)


def _of_ranks(folder: Path, ranks: list[Path]) -> ComparedRun:
    has_trace = any(is_trace_name(file.name) for rank in ranks for file in names_in(rank))
    read = {rank: rows for rank in ranks if (rows := plain_steps(rank / STEPS))}
    facts = _facts(folder, ranks)
    peaks = [peak for rank in ranks if (peak := _peak_bytes(rank)) is not None]
    peak = max(peaks, default=None)
    path = str(folder)
    if not read:
        if not has_trace:
            raise NotCapturedError(
                f"{folder} holds no step to compare: its capture saw none outside the window"
            )
        why = f"{folder}: no step was measured outside the profiler's window"
        return ComparedRun(
            path=path,
            steps_are="profiled",
            step_ms=np.empty(0),
            facts=facts,
            peak_bytes=peak,
            has_trace=True,
            notes=(why,),
        )
    steps = {rank: _steps_of(rows) for rank, rows in read.items()}
    slowest = max(steps, key=lambda rank: float(np.median(steps[rank][0])))
    step_ms, phases = steps[slowest]
    number = read_facts(slowest).get("rank", rank_of_folder(slowest))
    return ComparedRun(
        path=path,
        steps_are="measured",
        step_ms=step_ms,
        rank=number if len(ranks) > 1 else None,
        phases=phases,
        facts=facts,
        peak_bytes=peak,
        has_trace=has_trace,
        notes=_about_ranks(folder, ranks, len(read), facts),
    )


def _about_ranks(
    folder: Path, ranks: list[Path], read: int, facts: dict[str, Any]
) -> tuple[str, ...]:
    world = facts.get("world_size") or len(ranks)
    notes = []
    if read != world:
        notes.append(f"{folder}: steps of {read} of {world} ranks are here")
    if facts.get("exit_code"):
        notes.append(f"{folder}: its command ended with exit code {facts['exit_code']}")
    return tuple(notes)


def _steps_of(rows: list[StepRow]) -> tuple[Floats, dict[str, Floats]]:
    """The device's own time where it is known: a host that runs ahead ends its steps early."""
    timed = [row for row in rows if row.device_ns]
    rows = timed or rows
    steps = np.array([row.device_ns if timed else row.wall_ns for row in rows], np.float64) / 1e6
    phases = {
        phase: np.array([getattr(row, f"{phase}_ns") for row in rows], np.float64) / 1e6
        for phase in PHASES
    }
    return steps, phases


def _facts(folder: Path, ranks: list[Path]) -> dict[str, Any]:
    """The first rank's, with what the whole run knows."""
    found = read_facts(ranks[0]) if ranks else {}
    whole = read_record(folder / RUN, _WholeRun, Oddities(RUN), _MOST_BYTES) or _WholeRun()
    found["command"], found["exit_code"] = whole.command, whole.exit_code
    found["world_size"] = whole.world_size or found.get("world_size")
    return found


def _peak_bytes(rank: Path) -> int | None:
    """What the allocator held at most in the captured step."""
    captured, _ = read_captured(rank)
    return captured.peak.allocated_bytes if captured and captured.peak else None
