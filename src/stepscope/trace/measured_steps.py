"""What was measured without the profiler in the same run: a rank's steps.jsonl, summarised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.records.limits import Bytes, DurationNs, SomeDurationNs, StepNumber  # noqa: TC001  (decoded)
from stepscope.records.measured_steps import MeasuredSteps
from stepscope.trace.decode import Oddities
from stepscope.trace.step_files import read_step_columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from stepscope.records.step_columns import Ints, StepColumns

STEPS = "steps.jsonl"
_AHEAD = 0.93  # of the device's time for that step
_FREELY = 1.4  # times the quickest one: a longer one was held up inside
# Ranks in step differ by what one of them waits at the ends, and by chance.
_APART, _STEPS_APART = 0.1, 2
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


def summarise_steps(all_rows: Iterable[StepRow], slowest: Path | None) -> MeasuredSteps | None:
    """Medians over the plain steps; None when there are none.

    The step is the device's own time when that is known: a host that runs ahead ends its steps
    early. `slowest` is the trace of the rank whose steps count for the whole job (see
    `slowest_in_step`).
    """
    rows = list(filter(_is_plain, all_rows))
    if not rows:
        return None
    device = [row.device_ns for row in rows if row.device_ns is not None]
    steps = (slowest and _step_times(plain_steps(slowest.parent / STEPS))) or _step_times(rows)
    return MeasuredSteps(
        steps=len(steps),
        steps_ns=tuple(steps),
        step_ns=round(_median(steps)),
        wall_ns=round(_median(row.wall_ns for row in rows)),
        device_ns=round(_median(device)) if device else None,
        phases_ns=_phases(rows),
        host_ns=_phases(_ran_ahead(rows)),
    )


def _step_times(rows: list[StepRow]) -> list[int]:
    device = [row.device_ns for row in rows if row.device_ns is not None]
    return device or [row.wall_ns for row in rows]


def slowest_in_step(traces: Sequence[Path]) -> Path | None:
    """The trace of the rank whose median step is longest, where the ranks of a run train in step.

    Such ranks spend the same time on the same steps, so the job has one step, though their medians
    differ by chance. None where ranks go their own ways and where some measured no steps.
    """
    if len(traces) < 2 or len({trace.parent.parent for trace in traces}) > 1:
        return None
    ranks = []
    for trace in traces:
        ranks.append(_rows(trace.parent / STEPS))
        if not any(map(_is_plain, ranks[-1])):
            return None
    if not _in_step(ranks):
        return None
    medians = [_median(_step_times(list(filter(_is_plain, rows)))) for rows in ranks]
    return traces[medians.index(max(medians))]


def _in_step(ranks: Sequence[list[StepRow]]) -> bool:
    """Whether all ranks spent about the same time on the steps that all of them have."""
    walls = [{row.step: row.wall_ns for row in rows if not row.first} for rows in ranks]
    common = set.intersection(*map(set, walls))
    if not common:
        return False
    totals = [sum(wall[step] for step in common) for wall in walls]
    mean = sum(totals) / len(totals)
    return max(totals) - min(totals) <= _APART * mean + _STEPS_APART * mean / len(common)


def _phases(rows: list[StepRow]) -> dict[str, int]:
    return {
        phase: round(_median(getattr(row, f"{phase}_ns") for row in rows))
        for phase in (PHASES if rows else ())
    }


def _median(values: Iterable[int]) -> float:
    from statistics import median  # 4 ms, and most traces have no such file

    return median(values)


def _ran_ahead(rows: list[StepRow]) -> list[StepRow]:
    """Steps that the host was through with before the device: nothing held it up. The queue of
    launches fills up in a run of them, so most steps of a device-bound training are not such; the
    first ones and those after the window are."""
    ahead = [row for row in rows if row.wall_ns < _AHEAD * (row.device_ns or 0)]
    least = min((row.wall_ns for row in ahead), default=0)
    return [row for row in ahead if row.wall_ns < _FREELY * least]


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
