"""Find the runs that a path stands for (run folders, lists of step times, traces), each with
its steady steps, phases, stalls and facts.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.errors import NotCapturedError, UnreadableInputError, UsageError
from stepscope.explain.whole_run.rank_run import explain_run
from stepscope.explain.whole_run.stalls import find_steady
from stepscope.records.explanation import Explanation
from stepscope.records.folders import STEPS_FILE
from stepscope.records.quality import Ranks
from stepscope.records.rank import StepColumns, StepFlags
from stepscope.records.run import STALL_CAUSES, RankRun, Stall
from stepscope.trace.decode import NotJsonError, Oddities, brief, decode, read_record
from stepscope.trace.files import (
    is_folder,
    is_trace_name,
    list_folder,
    may_exist,
    read_start,
    read_whole,
)
from stepscope.trace.remote import is_url
from stepscope.trace.run_folder.rank_facts import RANK, folder_rank, read_facts
from stepscope.trace.run_folder.rank_folder import read_captured
from stepscope.trace.run_folder.run_state import MAX_RUN_BYTES, RUN, read_origin
from stepscope.trace.run_folder.step_files import read_step_columns

if TYPE_CHECKING:
    from stepscope.records.comparison import StepsAre
    from stepscope.verify.spread import Floats

    StepTimes = NDArray[np.float64]

# A job's step is that of its slowest rank: the one with the longest mean step. Ranks that train
# together take equally long; if one takes longer, the job waits for it.


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
    step_ms: StepTimes
    rank: int | None = None
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
        if may_exist(here / STEPS_FILE):
            return [_measured_run(here, [here])]
        ranks = _rank_folders(here)
        if ranks or may_exist(here / RUN):
            return [_measured_run(here, ranks)]
        inner = list_folder(here)
        runs = [path for path in inner if is_folder(path) and _rank_folders(path)]
        if runs and not any(is_trace_name(path.name) for path in inner):
            return [_measured_run(path, _rank_folders(path)) for path in runs]
        return [_traced_run(str(here))]
    if not may_exist(here):
        raise UnreadableInputError(f"{path} does not exist")
    if here.name == STEPS_FILE:
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
    return replace(
        run,
        steps_are="profiled",
        step_ms=np.array(steps_ns, np.float64) / 1e6,
        rank=slowest.rank if len(explanation.ranks) > 1 else None,
        columns=None,
        has_trace=True,
    )


def _rank_folders(run: Path) -> list[Path]:
    """Leave out folders of a second process that claimed the same rank (`rank-00000.2`)."""
    return [
        rank
        for rank in sorted(run.glob("rank-*"))
        if "." not in rank.name
        and is_folder(rank)
        and (may_exist(rank / STEPS_FILE) or may_exist(rank / RANK))
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
        return replace(_traced_run(path), facts=facts, peak_bytes=peak, notes=(why,))
    slowest = max(columns_by_rank, key=lambda rank: _mean_ns(columns_by_rank[rank]))
    columns = columns_by_rank[slowest]
    number = read_facts(slowest).get("rank", folder_rank(slowest))
    return ComparedRun(
        path=path,
        steps_are="measured",
        step_ms=columns.step_ns[columns.plain] / 1e6,
        rank=number if len(ranks) > 1 else None,
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
    """Return None without a plain step. What was odd about the file, `explain` says."""
    columns = read_step_columns(rank, Oddities(STEPS_FILE))
    if columns is None or not columns.plain.any():
        return None
    # Where the device timed some steps, only those count: a host that runs ahead ends its steps
    # early.
    if columns.device_ns is None:
        return columns
    timed = columns.device_ns > 0
    if not (timed & columns.plain).any():
        return msgspec.structs.replace(columns, device_ns=None)
    return msgspec.structs.replace(columns, whole=columns.whole & timed)


def _mean_ns(columns: StepColumns) -> float:
    steady, _ = find_steady(columns)
    return float(columns.step_ns[steady].mean())


def _facts(folder: Path, ranks: list[Path]) -> dict[str, Any]:
    """The first rank's facts, and those of the whole run."""
    facts = read_facts(ranks[0]) if ranks else {}
    whole = read_record(folder / RUN, _WholeRun, max_bytes=MAX_RUN_BYTES) or _WholeRun()
    facts["command"], facts["exit_code"] = whole.command, whole.exit_code
    facts["world_size"] = whole.world_size or facts.get("world_size")
    origin = read_origin(folder, ranks)
    facts["remedies"] = origin.remedies if origin else ()  # of all ranks, not of the first alone
    return facts


def _peak_bytes(rank: Path) -> int | None:
    """The most that the allocator held in the captured step."""
    captured, _ = read_captured(rank)
    return captured.peak.allocated_bytes if captured and captured.peak else None


# One run's steady steps, divided into typical steps and stalls, as `explain` divides them.

_MOST_NS = 2.0**62  # fits 64 bits; no step takes longer


class SteadySteps(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds; one value per steady step in each column."""

    warm_up: int  # steps left out at the beginning
    step_ms: Floats
    phases_ms: dict[str, Floats] = {}
    stalls_ms: dict[str, Floats] = {}  # by cause: what each step took longer for it


def find_steady_steps(steps: StepColumns) -> SteadySteps:
    """All plain steps after the warm-up, but for those that a window disturbed."""
    run = explain_run(steps)
    steady, _ = find_steady(steps)
    return SteadySteps(
        warm_up=int(steps.plain[: run.warm_up].sum()),
        step_ms=steps.step_ns[steady] / 1e6,
        phases_ms={phase: column[steady] / 1e6 for phase, column in steps.phases_ns.items()},
        stalls_ms={stall.cause: _stalls_ms(run, stall, steady) for stall in run.stalls},
    )


def _stalls_ms(run: RankRun, stall: Stall, steady: StepFlags) -> Floats:
    """Steps whose main cause it is bear all of its cost, in proportion to how long they took; all
    steps that stall do if it is never the main cause."""
    assert run.series is not None
    assert run.times is not None
    causes = run.series.cause[steady]
    chosen = causes == STALL_CAUSES.index(stall.cause)
    if not chosen.any():
        chosen = causes >= 0
    beyond = np.maximum(run.series.step_ns[steady] / 1e6 - run.times.typical_ms, 0.0)
    excess: Floats = np.where(chosen, beyond, 0.0)
    if not excess.any():
        return np.full(len(excess), stall.cost_ms)
    return excess * (stall.cost_ms / float(excess.mean()))


def columns_of_list(step_ms: Floats) -> StepColumns:
    """Step times of which nothing else is known."""
    count = len(step_ms)
    nothing: NDArray[np.bool_] = np.zeros(count, np.bool_)
    wall_ns = np.rint(np.clip(step_ms * 1e6, 1, _MOST_NS)).astype(np.int64)
    return StepColumns(
        number=np.arange(count),
        wall_ns=wall_ns,
        end_unix_ns=np.zeros(count, np.int64),
        phases_ns={},
        window=nothing,
        memory=nothing,
        whole=~nothing,
    )


# Lists of step times from a text file, CSV, JSON or JSON lines, as milliseconds.
#
# A column's name gives the unit if it ends in _ns, _us, _ms or _s, or is a unit itself; else the
# caller does.

UNITS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}
ENDINGS = (".txt", ".csv", ".tsv", ".jsonl", ".ndjson")
_LARGEST_JSON = 8 << 20  # a larger JSON file is a trace, unless it begins with a number
_LONGEST_MS = 1e15
_LONGEST_CELL = 64
_LARGEST, _MOST_LINES = 64 << 20, 4_000_000
_BOM = b"\xef\xbb\xbf"
_BARE_NUMBERS = re.compile(rb"\s*\[\s*[-\d]")
_UNIT_OF_NAME = re.compile(r"(?:^|_)(ns|us|ms|s)$", re.IGNORECASE)
_NUMBER = re.compile(r"([-+.\w]+?)\s*(ns|us|µs|ms|s)?", re.IGNORECASE)


def is_step_list(path: Path) -> bool:
    """Tell by its name; a .json file may be a trace as well, so its content decides."""
    if path.name.endswith(ENDINGS):
        return True
    if not path.name.endswith(".json"):
        return False
    try:
        text = read_start(path, _LARGEST_JSON + 1)
        if _BARE_NUMBERS.match(text[:256].removeprefix(_BOM)):
            return True
        return len(text) <= _LARGEST_JSON and _is_list(decode(text, Any))
    except (UnreadableInputError, NotJsonError):
        return False


def read_step_list(path: Path, unit: str = "ms", column: str | None = None) -> StepTimes:
    """Read steps in the file's order; raises UnreadableInputError for anything but step times."""
    text = _decode_file(path)
    if path.name.endswith(".json"):
        rows = _json_rows(path, _decoded(path, text))
    elif path.name.endswith((".jsonl", ".ndjson")):
        # A last line that was cut short is left out.
        rows = []
        lines = text.splitlines()
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                rows.append((number, decode(line.encode(), Any)))
            except NotJsonError as error:
                if number == len(lines):
                    break
                raise UnreadableInputError(f"{path}, line {number}: {error}") from None
    else:
        rows = _text_rows(text, path.name.endswith((".csv", ".tsv")))
    values = _values(path, rows, unit, column)
    if not len(values):
        raise UnreadableInputError(f"{path} holds no step times")
    return values


def _decode_file(path: Path) -> str:
    content = read_whole(path, _LARGEST)
    if content.count(b"\n") > _MOST_LINES:
        raise UnreadableInputError(f"{path} has more than {_MOST_LINES:,} lines: give fewer steps")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnreadableInputError(f"{path} is not text, but a step list is") from None


def _decoded(path: Path, text: str) -> Any:
    try:
        return decode(text.encode(), Any)
    except NotJsonError as error:
        raise UnreadableInputError(f"{path} is incomplete or not JSON: {error}") from None


def _is_list(content: Any) -> bool:
    if isinstance(content, dict):
        return "traceEvents" not in content and any(
            isinstance(value, list) and value and _is_number(value[0]) for value in content.values()
        )
    if not isinstance(content, list) or not content:
        return False
    first = content[0]
    return _is_number(first) or (isinstance(first, dict) and "ph" not in first)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _json_rows(path: Path, content: Any) -> list[tuple[int, Any]]:
    if isinstance(content, dict):
        lists = {
            name: value
            for name, value in content.items()
            if isinstance(value, list) and value and _is_number(value[0])
        }
        if not lists:
            raise UnreadableInputError(f"{path} holds no list of numbers")
        chosen = _choose(path, list(lists), None)
        return [(place, {chosen: value}) for place, value in enumerate(lists[chosen], 1)]
    if not isinstance(content, list):
        raise UnreadableInputError(f"{path} holds {brief(content)}, but a list is needed")
    return list(enumerate(content, 1))


def _text_rows(text: str, is_csv: bool) -> list[tuple[int, Any]]:
    lines = [
        (number, line.strip())
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not is_csv:
        return [(number, word) for number, line in lines for word in _words(line)]
    if not lines:
        return []
    delimiter = max(",;\t", key=lines[0][1].count)
    cells = [(number, _cells(line, delimiter)) for number, line in lines]
    head = cells[0][1]
    if any(_as_number(cell) is None for cell in head):
        return [(number, dict(zip(head, row, strict=False))) for number, row in cells[1:]]
    if len(head) == 1:
        return [(number, row[0]) for number, row in cells]
    names = [str(place) for place in range(1, len(head) + 1)]
    return [(number, dict(zip(names, row, strict=False))) for number, row in cells]


def _cells(line: str, delimiter: str) -> list[str]:
    """A line that is no CSV is one cell, which is no step time."""
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter))]
    except csv.Error:
        return [line]


def _words(line: str) -> list[str]:
    """Numbers between spaces or commas; a unit stays with its number."""
    return re.findall(r"[^\s,;]+(?:\s+(?:ns|us|µs|ms|s)\b)?", line)


def _values(
    path: Path, rows: Sequence[tuple[int, Any]], unit: str, column: str | None
) -> StepTimes:
    names = list(dict.fromkeys(name for _, row in rows if isinstance(row, dict) for name in row))
    if names:
        timed = [name for name in names if _UNIT_OF_NAME.search(name)]
        chosen = _choose(path, names if column or not timed else timed, column)
        named = _UNIT_OF_NAME.search(chosen)
        unit = named[1].lower() if named else unit
        rows = [
            (number, row[chosen] if isinstance(row, dict) else row)
            for number, row in rows
            if not isinstance(row, dict) or chosen in row
        ]
    elif column is not None:
        raise UsageError(f"--column {column}: {path} has no columns")
    plain = _plain_numbers([cell for _, cell in rows])
    if plain is not None:
        return plain * UNITS[unit]
    out = np.empty(len(rows))
    for place, (number, cell) in enumerate(rows):
        number_and_unit = _as_number(cell)
        if number_and_unit is None or not 0 < number_and_unit[0] <= _LONGEST_MS:
            raise UnreadableInputError(f"{path}, line {number}: {brief(cell)} is not a step time")
        out[place] = number_and_unit[0] * UNITS[number_and_unit[1] or unit]
    return out


def _plain_numbers(cells: Sequence[Any]) -> StepTimes | None:
    """All at once, which is fast; None unless every cell is a step time without a unit."""
    kinds = set(map(type, cells))
    if not kinds or (not kinds <= {int, float} and kinds != {str}):
        return None
    # numpy would give every cell the size of the longest
    if kinds == {str} and max(map(len, cells)) > _LONGEST_CELL:
        return None
    try:
        out = np.array(cells, np.float64)
    except (ValueError, OverflowError):
        return None
    return out if ((out > 0) & (out <= _LONGEST_MS)).all() else None


def _choose(path: Path, names: Sequence[str], column: str | None) -> str:
    if column is not None:
        if column in names:
            return column
        raise UsageError(f"{path} has no column {column}. It has {', '.join(names)}")
    if len(names) == 1:
        return names[0]
    steps = [name for name in names if name.lower().startswith("step")]
    timed = [name for name in steps if _UNIT_OF_NAME.search(name)] or steps
    if len(timed) == 1:
        return timed[0]
    raise UsageError(
        f"{path} has several columns. Name the one with step times: --column {'|'.join(names)}"
    )


def _as_number(cell: Any) -> tuple[float, str | None] | None:
    try:
        if _is_number(cell):
            return float(cell), None
        short = isinstance(cell, str) and len(cell) <= _LONGEST_CELL
        match = _NUMBER.fullmatch(cell.strip()) if short else None
        return (float(match[1]), _unit(match[2])) if match else None
    except (ValueError, OverflowError):  # a word, or an integer of hundreds of digits
        return None


def _unit(text: str | None) -> str | None:
    return (text or "").lower().replace("µ", "u") or None
