"""The runs that a path stands for: one or several, each with its steps, phases and facts.

A job's step is that of its slowest rank: the one with the longest mean step. Ranks that train
together take equally long; if one takes longer, the job waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from stepscope.errors import NotCapturedError, UnreadableInputError
from stepscope.explain.whole_run.steady import find_steady
from stepscope.records.limits import Ranks  # noqa: TC001  (decoded at run time)
from stepscope.trace.decode import Oddities
from stepscope.trace.layout import is_trace_name
from stepscope.trace.measured_steps import STEPS
from stepscope.trace.memory_file import read_captured
from stepscope.trace.rank_facts import RANK, folder_rank, read_facts
from stepscope.trace.regular_files import is_folder, list_folder, may_exist
from stepscope.trace.remote import is_url
from stepscope.trace.run_origin import read_origin
from stepscope.trace.side_files import read_record
from stepscope.trace.step_files import read_step_columns
from stepscope.verify.run_stalls import columns_of_list, without_untimed
from stepscope.verify.step_lists import is_step_list, read_step_list

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.comparison import StepsAre
    from stepscope.records.explanation import Explanation
    from stepscope.records.step_columns import StepColumns

    Floats = NDArray[np.float64]

RUN = "run.json"
_MOST_BYTES = 64 << 20  # of run.json, which lists every rank


class _WholeRun(msgspec.Struct, frozen=True, kw_only=True):
    """The part of run.json that concerns all ranks."""

    command: list[str] | None = None
    exit_code: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 32)] | None = None
    world_size: Ranks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run of one side; steps in the order they ran, in milliseconds."""

    path: str
    steps_are: StepsAre
    step_ms: Floats
    rank: int | None = None
    phases: dict[str, Floats] = field(default_factory=dict)
    columns: StepColumns | None = None  # all that was noted of each step; None for profiled ones
    facts: dict[str, Any] = field(default_factory=dict)  # of rank.json, and run.json's command
    peak_bytes: int | None = None
    has_trace: bool = False
    notes: tuple[str, ...] = ()


def find_runs(path: str, *, unit: str = "ms", column: str | None = None) -> list[ComparedRun]:
    """One run for a run folder, a step list, a trace or a folder of traces; several for a folder
    of runs.

    The steps of a trace are not read yet: `profiled_run` does that.
    """
    if is_url(path):
        return [_traced_run(path)]
    here = Path(path)
    if is_folder(here):
        return _runs_in_folder(here)
    if not may_exist(here):
        raise UnreadableInputError(f"{path} does not exist")
    if here.name == STEPS:
        return [_measured_run(here.parent, [here.parent])]
    if is_step_list(here):
        steps = read_step_list(here, unit, column)
        columns = columns_of_list(steps)
        return [ComparedRun(path=path, steps_are="listed", step_ms=steps, columns=columns)]
    return [_traced_run(path)]


def profiled_run(run: ComparedRun, explanation: Explanation) -> ComparedRun:
    """The same run with the steps of its trace, from the slowest rank."""
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


def _runs_in_folder(folder: Path) -> list[ComparedRun]:
    if may_exist(folder / STEPS):
        return [_measured_run(folder, [folder])]
    ranks = _rank_folders(folder)
    if ranks or may_exist(folder / RUN):
        return [_measured_run(folder, ranks)]
    inner = list_folder(folder)
    runs = [path for path in inner if is_folder(path) and _rank_folders(path)]
    if runs and not any(is_trace_name(path.name) for path in inner):
        return [_measured_run(path, _rank_folders(path)) for path in runs]
    return [_traced_run(str(folder))]


def _rank_folders(run: Path) -> list[Path]:
    """Without folders of a second process that claimed the same rank (`rank-00000.2`)."""
    return [
        rank
        for rank in sorted(run.glob("rank-*"))
        if "." not in rank.name
        and is_folder(rank)
        and (may_exist(rank / STEPS) or may_exist(rank / RANK))
    ]


def _traced_run(path: str) -> ComparedRun:
    return ComparedRun(path=path, steps_are="profiled", step_ms=np.empty(0), has_trace=True)


def _measured_run(folder: Path, ranks: list[Path]) -> ComparedRun:
    has_trace = any(is_trace_name(file.name) for rank in ranks for file in list_folder(rank))
    columns_by_rank = {rank: steps for rank in ranks if (steps := _plain_columns(rank))}
    facts = _facts(folder, ranks)
    peaks = [peak for rank in ranks if (peak := _peak_bytes(rank)) is not None]
    peak = max(peaks, default=None)
    path = str(folder)
    if not columns_by_rank:
        if not has_trace:
            raise NotCapturedError(
                f"{folder} has no step to compare: all of its steps are inside the profiled window"
            )
        why = f"{folder}: all of its steps are inside the profiled window"
        return ComparedRun(
            path=path,
            steps_are="profiled",
            step_ms=np.empty(0),
            facts=facts,
            peak_bytes=peak,
            has_trace=True,
            notes=(why,),
        )
    slowest = max(columns_by_rank, key=lambda rank: _mean_ns(columns_by_rank[rank]))
    columns = columns_by_rank[slowest]
    plain = columns.plain
    number = read_facts(slowest).get("rank", folder_rank(slowest))
    return ComparedRun(
        path=path,
        steps_are="measured",
        step_ms=columns.step_ns[plain] / 1e6,
        rank=number if len(ranks) > 1 else None,
        phases={phase: column[plain] / 1e6 for phase, column in columns.phases_ns.items()},
        columns=columns,
        facts=facts,
        peak_bytes=peak,
        has_trace=has_trace,
        notes=_notes(folder, ranks, len(columns_by_rank), facts),
    )


def _notes(
    folder: Path, ranks: list[Path], measured: int, facts: dict[str, Any]
) -> tuple[str, ...]:
    world = facts.get("world_size") or len(ranks)
    notes = []
    if measured != world:
        notes.append(f"{folder} has the steps of {measured} of {world} ranks")
    if facts.get("exit_code"):
        notes.append(f"{folder}: its command ended with exit code {facts['exit_code']}")
    return tuple(notes)


def _plain_columns(rank: Path) -> StepColumns | None:
    """None without a plain step. What was odd about the file, `explain` says."""
    columns = read_step_columns(rank, Oddities(STEPS))
    if columns is None or not columns.plain.any():
        return None
    return without_untimed(columns)


def _mean_ns(columns: StepColumns) -> float:
    steady, _ = find_steady(columns)
    return float(columns.step_ns[steady].mean())


def _facts(folder: Path, ranks: list[Path]) -> dict[str, Any]:
    """The first rank's facts, and those of the whole run."""
    facts = read_facts(ranks[0]) if ranks else {}
    whole = read_record(folder / RUN, _WholeRun, Oddities(RUN), _MOST_BYTES) or _WholeRun()
    facts["command"], facts["exit_code"] = whole.command, whole.exit_code
    facts["world_size"] = whole.world_size or facts.get("world_size")
    origin = read_origin(folder, ranks)
    facts["remedies"] = origin.remedies if origin else ()  # of all ranks, not of the first alone
    return facts


def _peak_bytes(rank: Path) -> int | None:
    """The most that the allocator held in the captured step."""
    captured, _ = read_captured(rank)
    return captured.peak.allocated_bytes if captured and captured.peak else None
