"""The steps measured next to a trace of a run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.trace.decode import Oddities
from stepscope.trace.measured_steps import STEPS, read_steps, summarise_steps

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.measured_steps import MeasuredSteps


def read_measured_steps(trace: Path, slowest: Path | None = None) -> MeasuredSteps | None:
    """None when there are none."""
    return summarise_steps(read_steps(trace.parent / STEPS, Oddities(STEPS)), slowest)
