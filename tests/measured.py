"""The steps measured next to a trace of a run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.whole_run.rank_run import explain_run, measure_typical_step
from stepscope.trace.decode import Oddities
from stepscope.trace.run_folder.step_files import read_step_columns

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.rank import MeasuredSteps


def read_measured_steps(trace: Path) -> MeasuredSteps | None:
    """None when there are none."""
    steps = read_step_columns(trace.parent, Oddities("steps.jsonl"))
    return measure_typical_step(steps, explain_run(steps)) if steps is not None else None
