"""What was measured without the profiler in the same run: a rank's steps.jsonl, summarised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.records.truth import Truth

if TYPE_CHECKING:
    from pathlib import Path

STEPS = "steps.jsonl"
_AHEAD = 0.93  # of the device's time for that step
_FREELY = 1.4  # times the quickest one: a longer one was held up inside
PHASES = ("data", "forward", "backward", "optimizer", "other")


class StepRow(msgspec.Struct, frozen=True):
    """A line of steps.jsonl."""

    step: int
    wall_ns: int
    window: bool = False
    first: bool = False
    last: bool = False
    memory: bool = False
    device_ns: int | None = None
    data_ns: int = 0
    forward_ns: int = 0
    backward_ns: int = 0
    optimizer_ns: int = 0
    other_ns: int = 0


def read_truth(trace: Path) -> Truth | None:
    """The truth beside a trace of a run folder; None where there is none.

    Only plain steps count: not those of the window or of the memory capture, nor one whose
    beginning or end was not seen. A line that a kill cut short is left out. The device's own time
    is the step where it is known: a host that runs ahead ends its steps early.
    """
    rows = plain_steps(trace.parent / STEPS)
    if not rows:
        return None
    from statistics import median  # 4 ms, and most traces have no such file

    device = [row.device_ns for row in rows if row.device_ns is not None]
    steps = device or [row.wall_ns for row in rows]
    return Truth(
        steps=len(steps),
        steps_ns=tuple(steps),
        step_ns=round(median(steps)),
        wall_ns=round(median(row.wall_ns for row in rows)),
        device_ns=round(median(device)) if device else None,
        phases_ns=_phases(rows),
        host_ns=_phases(_ran_ahead(rows)),
    )


def _phases(rows: list[StepRow]) -> dict[str, int]:
    if not rows:
        return {}
    from statistics import median

    return {phase: round(median(getattr(row, f"{phase}_ns") for row in rows)) for phase in PHASES}


def _ran_ahead(rows: list[StepRow]) -> list[StepRow]:
    """Steps that the host was through with before the device: nothing held it up. The queue of
    launches fills up in a run of them, so most steps of a device-bound training are not such; the
    first ones and those behind the window are."""
    ahead = [row for row in rows if row.wall_ns < _AHEAD * (row.device_ns or 0)]
    least = min((row.wall_ns for row in ahead), default=0)
    return [row for row in ahead if row.wall_ns < _FREELY * least]


def plain_steps(file: Path) -> list[StepRow]:
    """Not the window's, memory's, or half seen; a line that was cut short is left out."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError:
        return []
    rows = (row for line in lines if (row := _row(line)))
    return [row for row in rows if not (row.window or row.first or row.last or row.memory)]


def _row(line: bytes) -> StepRow | None:
    try:
        return msgspec.json.decode(line, type=StepRow)
    except msgspec.DecodeError:
        return None
