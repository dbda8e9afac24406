"""Steps measured without the profiler, one record per step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.records.limits import Bytes, DurationNs, SomeDurationNs, StepNumber  # noqa: TC001  (decoded)
from stepscope.trace.decode import Oddities
from stepscope.trace.step_files import read_step_columns

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.step_columns import Ints, StepColumns

STEPS = "steps.jsonl"
PHASES = ("data", "forward", "backward", "optimizer", "other")


class StepRow(msgspec.Struct, frozen=True):
    """A line of steps.jsonl. The phases are parts of the wall time."""

    step: StepNumber
    wall_ns: SomeDurationNs
    window: bool = False
    first: bool = False
    last: bool = False
    memory: bool = False
    device_ns: SomeDurationNs | None = None
    data_ns: DurationNs = 0
    forward_ns: DurationNs = 0
    backward_ns: DurationNs = 0
    optimizer_ns: DurationNs = 0
    other_ns: DurationNs = 0
    allocated_bytes: Bytes | None = None  # when it ended


def plain_steps(file: Path) -> list[StepRow]:
    """Not the window's, memory's, or half seen; a line that was cut short is left out."""
    return list(filter(_is_plain, _rows(file)))


def _is_plain(row: StepRow) -> bool:
    return not (row.window or row.first or row.last or row.memory)


def _rows(file: Path) -> list[StepRow]:
    return read_steps(file, Oddities(STEPS))


def read_steps(file: Path, oddities: Oddities) -> list[StepRow]:
    """Every step once, in their order. Of two lines about one step the first counts."""
    columns = read_step_columns(file.parent, oddities)
    return [] if columns is None else _to_rows(columns)


def _to_rows(columns: StepColumns) -> list[StepRow]:
    nothing = [0] * len(columns)
    phases = [columns.phases_ns.get(phase) for phase in PHASES]
    lists = [nothing if values is None else values.tolist() for values in phases]
    whole, unknown = columns.whole.tolist(), [None] * len(columns)
    device, size = columns.device_ns, columns.allocated_bytes
    return [
        StepRow(step, wall, window, not seen, False, memory, *rest)
        for step, wall, window, seen, memory, *rest in zip(
            columns.number.tolist(),
            columns.wall_ns.tolist(),
            columns.window.tolist(),
            whole,
            columns.memory.tolist(),
            unknown if device is None else _or_none(device),
            *lists,
            unknown if size is None else _or_none(size),
            strict=True,
        )
    ]


def _or_none(values: Ints) -> list[int | None]:
    return [None if value < 0 else value for value in values.tolist()]
