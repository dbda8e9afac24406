"""Steps measured without the profiler, in the same run as a trace."""

from __future__ import annotations

import msgspec


class MeasuredSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the plain steps: undisturbed steps outside the profiler's window."""

    steps: int
    steps_ns: tuple[int, ...]
    step_ns: int  # the step of record: device time if known, else wall time
    wall_ns: int
    device_ns: int | None
    phases_ns: dict[str, int]
    host_ns: dict[str, int] = {}  # phases of steps in which the host ran ahead; may be empty
