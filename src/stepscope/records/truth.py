"""Steps measured without the profiler, in the same run as a trace."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Medians over the steps outside the window."""

    steps: int
    wall_ns: tuple[int, ...]
    step_ns: int
    device_ns: int | None
    phases_ns: dict[str, int]
