"""Step times over a run in one line of characters, and what made steps stall below it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from stepscope.records.whole_run import STALL_CAUSES
from stepscope.ui.terminal.bars import COLOURS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.whole_run import StepSeries

    Floats = NDArray[np.float64]

_HEIGHTS = "▁▂▃▄▅▆▇█"
# The full height stands for this many typical steps, at least and at most.
_LOWEST_TOP, _HIGHEST_TOP = 3.0, 6.0
# For terminals without colours: data, evaluation, checkpoint, gc, recompile, allocator, waits for
# ranks, operating system, logging, unknown, collecting, generating, without gradients.
LETTERS = dict(zip(STALL_CAUSES, "decgrawolutnf", strict=True))
_NO_STALL = "·"


def draw_steps(series: StepSeries, width: int, last: int | None = None) -> Text:
    """Mean step of equal stretches of the run, or of its `last` steps, in `width` characters.

    Warm-up and our own windows are left out. Stretches with stalls have the colour of the costliest
    cause.
    """
    times, causes = _steady(series, last)
    means = _sums(times, width) / np.maximum(_sums(np.ones(len(times)), width), 1)
    return Text.assemble(
        *(
            (char, "" if cause < 0 else COLOURS[f"stall_{STALL_CAUSES[cause]}"])
            for char, cause in zip(_chars(means), _main_causes(times, causes, width), strict=True)
        )
    )


def mark_stalls(series: StepSeries, width: int, last: int | None = None) -> Text:
    """A letter (see LETTERS) below each stretch that has stalls; empty if none has."""
    times, causes = _steady(series, last)
    main = _main_causes(times, causes, width)
    if all(cause < 0 for cause in main):
        return Text()
    return Text.assemble(
        *((_NO_STALL, "bright_black") if cause < 0 else _letter(cause) for cause in main)
    )


def _letter(cause: int) -> tuple[str, str]:
    name = STALL_CAUSES[cause]
    return LETTERS[name], COLOURS[f"stall_{name}"]


def _steady(series: StepSeries, last: int | None) -> tuple[Floats, NDArray[np.int8]]:
    chosen = np.flatnonzero(~series.window[series.warm_up :]) + series.warm_up
    chosen = chosen[-last:] if last else chosen
    return series.step_ns[chosen].astype(np.float64), series.cause[chosen]


def _sums(values: Floats, width: int) -> Floats:
    """Of equal stretches, one for each character; a short run takes one for each step."""
    count = min(width, len(values))
    starts = np.arange(count) * len(values) // max(count, 1)
    sums: Floats = np.add.reduceat(values, starts) if count else np.empty(0)
    return sums


def _chars(means: Floats) -> str:
    if not len(means):
        return ""
    typical = max(float(np.median(means)), 1.0)
    top = min(max(float(means.max()), _LOWEST_TOP * typical), _HIGHEST_TOP * typical)
    heights = np.clip(means / top * len(_HEIGHTS), 0, len(_HEIGHTS) - 1).astype(int)
    return "".join(_HEIGHTS[height] for height in heights)


def _main_causes(times: Floats, causes: NDArray[np.int8], width: int) -> list[int]:
    """For each stretch the cause whose steps took most of it; -1 for none."""
    spent = [
        _sums(np.where(causes == cause, times, 0.0), width) for cause in range(len(STALL_CAUSES))
    ]
    table = np.array(spent)
    if not table.shape[1]:
        return []
    main = np.where(table.any(axis=0), table.argmax(axis=0), -1)
    return [int(cause) for cause in main]
