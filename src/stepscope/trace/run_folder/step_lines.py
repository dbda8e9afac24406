"""Lines of steps.jsonl as arrays. A line holds a step, or a stretch of steps of which capture noted
only the ends; their time is divided among the phases here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from stepscope.records.folders import ABSENT, MARKS, STEP
from stepscope.records.normal import median
from stepscope.records.quality import (
    MAX_DURATION_NS,
    Bytes,
    Count,
    DurationNs,
    SomeDurationNs,
    StampNs,
    StepNumber,
)
from stepscope.records.rank import USUAL_PHASES, Ints, StepColumns, StepFlags

_KINDS = {"H": "<u2", "I": "<u4", "q": "<i8"}
MOST_STEPS = 1 << 20  # of one line
_PACE = 0.05  # a host that is so near to the device's pace in a stretch does not run ahead of it
_NEAR = 16  # noted steps on each side of one that was not
_LONG = 1.5  # times usual steps: what an unnoted step takes beyond that belongs to no phase
_ENOUGH = 20  # steps of each kind that tell what noting one takes


class StepLine(msgspec.Struct, frozen=True, gc=False):
    """A line of steps.jsonl; what it lacks is ABSENT, a mark that it lacks is not set."""

    step: StepNumber
    wall_ns: SomeDurationNs
    end_unix_ns: StampNs = ABSENT
    data_ns: DurationNs = ABSENT
    forward_ns: DurationNs = ABSENT
    backward_ns: DurationNs = ABSENT
    optimizer_ns: DurationNs = ABSENT
    evaluation_ns: DurationNs = ABSENT
    checkpoint_ns: DurationNs = ABSENT
    gc_ns: DurationNs = ABSENT
    compile_ns: DurationNs = ABSENT
    between_epochs_ns: DurationNs = ABSENT
    unnoted_ns: DurationNs = ABSENT
    other_ns: DurationNs = ABSENT
    epoch_gap_ns: DurationNs = ABSENT
    device_ns: SomeDurationNs | None = ABSENT
    elements: Count = ABSENT
    allocated_bytes: Bytes | None = ABSENT
    cpu_wait_ns: DurationNs = ABSENT
    major_faults: Count = ABSENT
    retries: Count = ABSENT
    graphs: Count = ABSENT
    window: bool = False
    first: bool = False
    last: bool = False
    memory: bool = False
    skipped: bool = False
    host: bool = False
    # Of a line that holds a stretch of steps; its other times are of all together.
    steps: Count = 1
    unit: Count = 0
    walls: str = ""


_OF_STRETCHES = 3  # fields
STEP_LINE_FIELDS = StepLine.__struct_fields__[:-_OF_STRETCHES]


def step_rows(lines: list[StepLine]) -> Ints:
    """One row per field, in the order of STEP_LINE_FIELDS; one column per step. A stretch that
    cannot be true is left out."""
    stretches = [place for place, line in enumerate(lines) if line.walls]
    if not stretches:
        return _rows_of_steps(lines)
    pieces, done = [], 0
    for place in stretches:
        if place > done:
            pieces.append(_rows_of_steps(lines[done:place]))
        columns = stretch_columns(lines[place])
        if columns is not None:
            pieces.append(_rows_of_stretch(columns))
        done = place + 1
    if done < len(lines):
        pieces.append(_rows_of_steps(lines[done:]))
    return np.concatenate(pieces or [np.empty((len(STEP_LINE_FIELDS), 0), np.int64)], axis=1)


def _rows_of_steps(lines: list[StepLine]) -> Ints:
    def values() -> Iterator[Any]:
        return chain.from_iterable(msgspec.structs.astuple(line)[:-_OF_STRETCHES] for line in lines)

    try:
        flat = np.fromiter(values(), np.int64, len(lines) * len(STEP_LINE_FIELDS))
    except TypeError:  # a null
        flat = np.array([ABSENT if value is None else value for value in values()], np.int64)
    return flat.reshape(len(lines), -1).T


def _rows_of_stretch(columns: dict[str, Ints]) -> Ints:
    rows = np.full((len(STEP_LINE_FIELDS), len(columns[STEP])), ABSENT, np.int64)
    for place, name in enumerate(STEP_LINE_FIELDS):
        if name in columns:
            rows[place] = columns[name]
        elif name in MARKS:
            rows[place] = 0
    return rows


def stretch_columns(line: StepLine) -> dict[str, Ints] | None:
    """The columns of its steps; None if the line cannot be true.

    The device's time of each step is not known, only that of all. Where the host keeps the device's
    pace each step has its own share; where it runs ahead of the device all have the same.
    """
    walls = _walls(line)
    if walls is None:
        return None
    count, total = len(walls), int(walls.sum())
    columns = {
        "step": line.step + np.arange(count),
        "wall_ns": walls,
        "unnoted_ns": walls,
        "end_unix_ns": line.end_unix_ns - total + np.cumsum(walls),
    }
    if line.end_unix_ns < total:
        columns["end_unix_ns"] = np.full(count, ABSENT)
    # What the system counted since it was asked before belongs to the longest step.
    for name in ("cpu_wait_ns", "major_faults", "retries"):
        if (counted := getattr(line, name)) > 0:
            columns[name] = np.full(count, ABSENT)
            columns[name][np.argmax(walls)] = counted
    if line.allocated_bytes is not None and line.allocated_bytes >= 0:
        columns["allocated_bytes"] = np.full(count, ABSENT)
        columns["allocated_bytes"][-1] = line.allocated_bytes
    if line.device_ns is not None and line.device_ns >= 0:
        same_pace = abs(line.device_ns - total) <= _PACE * total
        shares = walls / total if same_pace else np.full(count, 1 / count)
        columns["device_ns"] = np.rint(line.device_ns * shares).astype(np.int64)
    return columns


def _walls(line: StepLine) -> Ints | None:
    kind, text = line.walls[:1], line.walls[1:]
    if kind not in _KINDS or not 1 <= line.steps <= MOST_STEPS or not 1 <= line.unit <= 1 << 40:
        return None
    try:
        data = base64.b64decode(text, validate=True)
        walls = np.frombuffer(data, _KINDS[kind]).astype(np.float64) * line.unit
    except (binascii.Error, ValueError):
        return None
    if len(walls) != line.steps or walls.min() < 0 or walls.sum() > MAX_DURATION_NS:
        return None
    # The clock may not have moved on between two rounded ends.
    return np.maximum(walls.astype(np.int64), 1)


def fill_phases(
    phases_ns: Mapping[str, Ints], unnoted_ns: Ints, wall_ns: Ints, plain: StepFlags
) -> dict[str, Ints]:
    """The phases with unnoted time divided among them as in the noted `plain` steps next to it."""
    filled = dict(phases_ns)
    unnoted = np.flatnonzero(unnoted_ns > 0)
    noted = np.flatnonzero(plain & (unnoted_ns <= 0))
    if not len(unnoted) or not len(noted):
        return filled
    # One that stalled in a phase says nothing about its neighbours.
    noted = noted[wall_ns[noted] <= _LONG * median(wall_ns[noted])]
    place = np.searchsorted(noted, unnoted)
    low, high = np.maximum(place - _NEAR, 0), np.minimum(place + _NEAR, len(noted))

    def near(column: Ints) -> Ints:
        sums = np.concatenate(([0], np.cumsum(column[noted])))
        return sums[high] - sums[low]

    sums = {name: near(filled[name]) for name in USUAL_PHASES if name in filled}
    of_all = np.maximum(sum(sums.values(), np.zeros(len(unnoted), np.int64)), 1)
    usual = median(wall_ns[unnoted])
    left = np.minimum(unnoted_ns[unnoted], int(_LONG * usual))
    for name, of_phase in sums.items():
        column = filled[name].copy()
        column[unnoted] += (left * (of_phase / of_all)).astype(np.int64)
        filled[name] = column
    return filled


def noting_ns(step_ns: Ints, noted: StepFlags, plain: StepFlags) -> int:
    """How much longer a plain step is when it is noted: by the middle of the differences to the
    step before, which was not."""
    pairs = np.flatnonzero(noted[1:] & ~noted[:-1] & plain[1:] & plain[:-1]) + 1
    if len(pairs) < _ENOUGH:
        return 0
    return max(0, int(median(step_ns[pairs] - step_ns[pairs - 1])))


def with_unnoted(steps: StepColumns, unnoted_ns: Ints) -> StepColumns:
    """The steps when so much of each was not noted."""
    if not (unnoted_ns > 0).any():
        return steps
    plain, noted = steps.plain, unnoted_ns <= 0
    return msgspec.structs.replace(
        steps,
        phases_ns=fill_phases(steps.phases_ns, unnoted_ns, steps.wall_ns, plain),
        unnoted_ns=unnoted_ns,
        ours_ns=noting_ns(steps.step_ns, noted, plain),
    )
