"""Read every step of a rank as columns: its packed parts, then steps.jsonl.

A run of a month has millions of steps, so nothing here loops over them: lines are decoded a few
thousand at a time, and every check is one operation on a column.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stepscope.errors import UnreadableInputError
from stepscope.records.folders import (
    ABSENT,
    END,
    EXTRA_FIELDS,
    MARKS,
    OTHER,
    PACKED_SCHEMA,
    PHASE_FIELDS,
    STEP,
    STEPS_FILE,
    WALL,
    part_name,
    part_number,
)
from stepscope.records.quality import (
    MAX_BYTES,
    MAX_DURATION_NS,
    MAX_STAMP_NS,
    Count,
    Note,
)
from stepscope.records.rank import ALL_PHASES, Ints, StepColumns, StepFlags
from stepscope.text import figures
from stepscope.text.words import counted
from stepscope.trace.decode import NotJsonError, Oddities, decode, read_record, read_row_batches
from stepscope.trace.files import LineFile, list_folder, read_whole
from stepscope.trace.run_folder.step_lines import (
    STEP_LINE_FIELDS,
    StepLine,
    step_rows,
    with_unnoted,
)

Chunk = dict[str, Ints]

MAX_STEPS = 20_000_000  # lines of steps.jsonl; those of older captures are not packed
MAX_STEPS_BYTES = 8 << 30
_ZERO_IS_KNOWN = ("device_ns", "allocated_bytes")  # elsewhere a missing number is zero
# A clock that is only corrected, not set, stays within these of the steps' own times.
_CLOCK_STEP_NS, _CLOCK_STEP = 100_000_000, 0.01


class _Counters(msgspec.Struct, frozen=True):
    """What capture read at step ends, by rank.json."""

    cpu_wait_ns: bool = False
    major_faults: bool = False
    memory: str | None = None

    @property
    def fields(self) -> list[str]:
        """Return where a line lacks one of these, it was zero."""
        counted = {
            "cpu_wait_ns": self.cpu_wait_ns,
            "major_faults": self.major_faults,
            "retries": self.memory == "device",
        }
        return ["epoch_gap_ns", "graphs", *(name for name, is_read in counted.items() if is_read)]


class _CountingRank(msgspec.Struct, frozen=True):
    counters: _Counters | None = None
    status: str = ""
    steps: Count = 0


def read_step_columns(folder: Path, oddities: Oddities) -> StepColumns | None:
    """All steps of a rank's folder, each once and in order; None when none was captured.

    Of two lines about one step the first counts. What is missing or makes no sense is left out, and
    `oddities` says so.
    """
    # The tail first: steps that a running job packs meanwhile are then in both, and count once.
    lines = LineFile((folder / STEPS_FILE), max_lines=MAX_STEPS, max_bytes=MAX_STEPS_BYTES)
    batches = read_row_batches(lines, StepLine, oddities)
    tail = [_to_chunk(rows) for rows in batches if rows]
    parts = _read_parts(folder, oddities)
    packed = sum(len(chunk[STEP]) for chunk in parts)
    chunks = parts + tail
    if not chunks:
        return None
    columns = _in_order(_join(chunks), packed, oddities)
    _drop_long_phases(columns, oddities)
    rank = _read_counts(folder)
    for name in rank.counters.fields if rank.counters is not None else []:
        columns.setdefault(name, np.zeros(len(columns[STEP]), np.int64))
    steps = _to_record(columns)
    _note_gaps(steps.number, oddities)
    # A rank that closed its files counted its steps: fewer in the files were lost later.
    seen = int(steps.number[-1]) + 1
    if rank.status == "finished" and rank.steps > seen:
        lost = counted(rank.steps - seen, "step")
        detail = f"the last {lost} of {rank.steps:,} are missing: the file was cut"
        oddities.also(
            Note(id="missing-steps", detail=f"{STEPS_FILE}: {detail}", count=rank.steps - seen)
        )
    _note_clock(steps, oddities)
    return steps


# Files -> chunks of raw columns.


def _read_parts(folder: Path, oddities: Oddities) -> list[Chunk]:
    chunks = []
    numbers = _part_numbers(folder)
    for number in range(1, max(numbers, default=0) + 1):
        try:
            if number not in numbers:
                raise UnreadableInputError("it is missing")
            chunks.append(read_part(folder / part_name(number)))
        except UnreadableInputError as error:
            detail = f"{part_name(number)} could not be read, its steps are missing: {error}"
            oddities.also(Note(id="side-file-unreadable", detail=detail))
    return chunks


def _part_numbers(folder: Path) -> set[int]:
    try:
        names = [path.name for path in list_folder(folder)]
    except UnreadableInputError:
        return set()
    return {number for name in names if (number := part_number(name))}


def _to_chunk(rows: list[StepLine]) -> Chunk:
    """Fields and marks that no row has are left out."""
    columns = step_rows(rows)
    return {
        name: values.copy()
        for name, values in zip(STEP_LINE_FIELDS, columns, strict=True)
        if (values != (0 if name in MARKS else ABSENT)).any()
    }


def _join(chunks: list[Chunk]) -> Chunk:
    names = [name for name in STEP_LINE_FIELDS if any(name in chunk for chunk in chunks)]
    return {name: np.concatenate([_column(chunk, name) for chunk in chunks]) for name in names}


def _column(chunk: Chunk, name: str) -> Ints:
    """Taken out of its chunk, so that memory does not hold it twice for long."""
    length = len(chunk[STEP])
    values = chunk[STEP] if name == STEP else chunk.pop(name, None)
    return np.full(length, ABSENT, np.int64) if values is None else values


def _read_counts(folder: Path) -> _CountingRank:
    """Return what was counted; older captures did not count."""
    rank = read_record(folder / "rank.json", _CountingRank)
    return rank if rank is not None else _CountingRank()


# Bad input.


def _in_order(columns: Chunk, packed: int, oddities: Oddities) -> Chunk:
    """Every step once, in their order; the first `packed` rows come from packed parts."""
    numbers = columns[STEP]
    if (np.diff(numbers) > 0).all():
        return columns
    places, which = np.unique(numbers, return_index=True, return_inverse=True)[1:]
    here, first = np.arange(len(numbers)), places[which]
    # A process that was killed while it packed leaves steps in both files.
    copied = (first < packed) & (here >= packed) & (columns[WALL] == columns[WALL][first])
    _note_each(numbers, (first != here) & ~copied, "it is there twice", oddities)
    kept = np.sort(places)
    back = np.flatnonzero(np.diff(numbers[kept]) < 0)
    if len(back):
        number, before = numbers[kept][back[0] + 1], numbers[kept][back[0]]
        oddities.add(f"step {number}", f"it comes after step {before}", len(back))
    return {name: values[places] for name, values in columns.items()}


def _note_each(numbers: Ints, odd: StepFlags, why: str, oddities: Oddities) -> None:
    if odd.any():
        oddities.add(f"step {numbers[odd][0]}", why, int(odd.sum()))


def _drop_long_phases(columns: Chunk, oddities: Oddities) -> None:
    """Phases that are longer than their step count as not captured."""
    names = [name for name in (*PHASE_FIELDS, OTHER) if name in columns]
    total = sum((np.maximum(columns[name], 0) for name in names), np.zeros_like(columns[WALL]))
    long = total > columns[WALL]
    _note_each(columns[STEP], long, "its phases are longer than the step", oddities)
    for name in names if long.any() else ():
        columns[name] = np.where(long, 0, columns[name])


def _note_gaps(numbers: Ints, oddities: Oddities) -> None:
    missing = np.diff(numbers) - 1
    gaps = np.flatnonzero(missing)
    if not len(gaps):
        return
    after, count = int(numbers[gaps[0]]), int(missing.sum())
    where = f"the first gap follows step {after}" if len(gaps) > 1 else f"after step {after}"
    detail = f"{counted(count, 'step')} of {int(numbers[-1]) + 1:,} are missing, {where}"
    oddities.also(Note(id="missing-steps", detail=f"{STEPS_FILE}: {detail}", count=count))


def clock_jumps(steps: StepColumns) -> Ints:
    """Return for each step by how much the wall clock was set while it ran (0: it was not).

    The wall clock must advance by a step's own time. It may advance by more around windows, the
    memory step and missing steps: capture works there outside any step.
    """
    jumps = np.zeros(len(steps), np.int64)
    if len(steps) < 2:
        return jumps
    ends, walls = steps.end_unix_ns, steps.wall_ns[1:]
    excess = np.diff(ends) - walls
    ours = steps.window | steps.memory | ~steps.whole
    disturbed = ours[1:] | ours[:-1] | (np.diff(steps.number) != 1)
    known = (ends[1:] > 0) & (ends[:-1] > 0)
    allowed = _CLOCK_STEP_NS + (_CLOCK_STEP * walls).astype(np.int64)
    jumped = known & ((excess < -allowed) | (excess > allowed) & ~disturbed)
    jumps[1:] = np.where(jumped, excess, 0)
    return jumps


def _note_clock(steps: StepColumns, oddities: Oddities) -> None:
    jumps = clock_jumps(steps)
    places = np.flatnonzero(jumps)
    if not len(places):
        return
    size = int(jumps[places[0]])
    how = f"{figures.duration(abs(size))} {'forward' if size > 0 else 'back'}"
    times = f", the first of {len(places):,} times" if len(places) > 1 else ""
    detail = f"the wall clock was set {how} at step {steps.number[places[0]]}{times}"
    oddities.also(Note(id="clock-set", detail=f"{STEPS_FILE}: {detail}", count=len(places)))


# Columns -> the record.


def _to_record(columns: Chunk) -> StepColumns:
    extras: dict[str, Any] = {
        name: _known(columns, name) for name in EXTRA_FIELDS if name in columns
    }
    nothing = np.zeros(len(columns[STEP]), np.int8)
    marks = {name: columns.get(name, nothing) == 1 for name in MARKS}
    phases = {phase: _known(columns, f"{phase}_ns") for phase in ALL_PHASES}
    steps = StepColumns(
        number=columns[STEP],
        wall_ns=columns[WALL],
        end_unix_ns=_known(columns, END),
        phases_ns={phase: values for phase, values in phases.items() if values.any()},
        window=marks["window"],
        memory=marks["memory"] | marks["host"],
        whole=~(marks["first"] | marks["last"]),
        **extras,
    )
    if "unnoted_ns" not in columns:
        return steps
    return with_unnoted(steps, _known(columns, "unnoted_ns"))


def _known(columns: Chunk, name: str) -> Ints:
    """The column, with the value that stands for "not known" where a line lacks it."""
    if name not in columns:
        return np.zeros(len(columns[STEP]) if name == END else 0, np.int64)
    values = columns[name]
    return values if name in _ZERO_IS_KNOWN else np.maximum(values, 0, out=values)


# One packed part of a rank's steps -> columns. A part is read whole or not at all.

_MAX_TEXT_BYTES = 256 << 20
_MAX_STEP = 1 << 48


class _Part(msgspec.Struct, frozen=True):
    schema: int
    steps: int
    base: dict[str, int]
    columns: dict[str, list[int]]
    unit: dict[str, int] = {}
    marks: dict[str, list[int]] = {}
    stretches: list[StepLine] = []


def read_part(file: Path) -> dict[str, Ints]:
    """Every field of the part's steps, in the order of the lines that they were, and the marks as
    zeros and ones. Raises UnreadableInputError."""
    part = _decode_part(file)
    try:
        columns = {name: _part_column(part, name) for name in part.columns}
        if part.steps < 1 or not {STEP, WALL} <= columns.keys():
            raise UnreadableInputError("it holds no steps")
        short = [name for name, values in columns.items() if values.shape != (part.steps,)]
        if short:
            raise UnreadableInputError(f"its column {short[0]} does not have {part.steps} values")
        columns = _restore(columns)
        columns |= {
            name: _flags(places, part.steps)
            for name, places in part.marks.items()
            if places and name in MARKS
        }
    except (OverflowError, ValueError, IndexError) as error:
        raise UnreadableInputError(str(error)) from None
    for name, values in columns.items():
        low, high = _bounds(name)
        if values.min() < low or values.max() > high:
            raise UnreadableInputError(f"its column {name} holds values that cannot be true")
    return _with_stretches(columns, part.stretches) if part.stretches else columns


def _with_stretches(columns: Chunk, stretches: list[StepLine]) -> Chunk:
    """In the order of their steps."""
    found = _to_chunk(stretches)
    names = {**columns, **found}
    joined = {
        name: np.concatenate([_column(columns, name), _column(found, name)])
        for name in sorted(names, key=lambda name: name == STEP)
    }
    order = np.argsort(joined[STEP], kind="stable")
    return {name: values[order] for name, values in joined.items()}


def _part_column(part: _Part, name: str) -> Ints:
    values = np.array(part.columns[name], np.int64) + part.base.get(name, 0)
    unit = part.unit.get(name, 1)
    return values if unit == 1 else np.where(values < 0, ABSENT, values * unit)


def _decode_part(file: Path) -> _Part:
    try:
        data = read_whole(file)
        unpack = zlib.decompressobj(wbits=31)
        text = unpack.decompress(data, _MAX_TEXT_BYTES)
        if not unpack.eof:
            raise UnreadableInputError("it ends early")
        part = decode(text, _Part)
    except (NotJsonError, zlib.error) as error:
        raise UnreadableInputError(str(error)) from None
    if part.schema != PACKED_SCHEMA:
        raise UnreadableInputError(f"a newer stepscope wrote it (schema {part.schema})")
    return part


def _restore(columns: dict[str, Ints]) -> dict[str, Ints]:
    """The fields that were stored as what the others leave."""
    restored = dict(columns)
    restored[STEP] = np.cumsum(columns[STEP])
    if OTHER in columns:
        phases = (columns[name] for name in PHASE_FIELDS if name in columns)
        known = sum((np.maximum(values, 0) for values in phases), np.zeros_like(columns[WALL]))
        restored[OTHER] = columns[WALL] - known + columns[OTHER]
    if END in columns:
        restored[END] = np.cumsum(columns[END] + columns[WALL])
    return restored


def _flags(places: list[int], steps: int) -> Ints:
    flags = np.zeros(steps, np.int64)
    flags[np.array(places, np.int64)] = 1
    return flags


def _bounds(name: str) -> tuple[int, int]:
    if name == STEP:
        return 0, _MAX_STEP
    if name == WALL:
        return 1, MAX_DURATION_NS
    if name in EXTRA_FIELDS and not name.endswith("_ns"):
        return ABSENT, MAX_BYTES
    return ABSENT, MAX_STAMP_NS if name == END else MAX_DURATION_NS
