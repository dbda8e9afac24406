"""Whether the recorded steps had inputs like those of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.records.figures import factor
from stepscope.records.quality import Note

if TYPE_CHECKING:
    from stepscope.records.step_columns import StepColumns
    from stepscope.records.whole_run import RankRun

_LEAST_DIFFERENCE = 1.25  # times as many elements, or as few


def note_other_inputs(steps: StepColumns | None, run: RankRun | None) -> tuple[Note, ...]:
    """The window shows which operators a step consists of. Where inputs decide how long steps take,
    and the window's are smaller or larger than the run's, so are its operators."""
    if steps is None or steps.elements is None or run is None or run.inputs is None:
        return ()
    known = steps.elements > 0
    recorded, others = steps.elements[known & steps.window], steps.elements[known & ~steps.window]
    if not len(recorded) or not len(others[run.warm_up :]):
        return ()
    inside, outside = float(np.mean(recorded)), float(np.mean(others[run.warm_up :]))
    if max(inside / outside, outside / inside) < _LEAST_DIFFERENCE:
        return ()
    detail = (
        f"the recorded steps have {factor(inside / outside)} times as many elements in a batch as "
        f"the run's mean step ({round(inside):,} and {round(outside):,}). Its operators may take "
        "other shares than shown: record other steps (`stepscope run --wait N`, or --every N)"
    )
    return (Note(id="other-inputs", detail=detail),)
