"""Steps measured without the profiler, in the same run as a trace."""

from __future__ import annotations

import msgspec


class MeasuredSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The typical step: steady steps without stalls (explain/whole_run)."""

    steps: int
    steps_ns: tuple[int, ...]  # all steady ones, stalls too
    step_ns: int  # the mean step without stalls: device time if known, else wall time
    wall_ns: int
    device_ns: int | None
    phases_ns: dict[str, int]
    data_ns: int | None = None  # the mean wait for data in a step that is no stall
    host_ns: dict[str, int] = {}  # phases of steps in which the host ran ahead; may be empty
