"""Which of a rank's windows stands for the run, when `--every` recorded several.

All ranks of a job must show the same steps, so one window is chosen for all of them: the latest one
whose surrounding steps are about as long as the run's typical step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.records.folders import STEPS_FILE
from stepscope.records.normal import median

if TYPE_CHECKING:
    from stepscope.records.rank import StepColumns

_FIRST = re.compile(r"trace\.json[^/]*")
_REGULAR = re.compile(r"trace-step-(\d+)\.json[^/]*")
_AROUND = 20  # steps before a window, and as many after it, that it is compared by
_ALIKE = 0.05


def comms_of(trace: Path) -> str:
    """The file with the collectives of this window."""
    match = _REGULAR.fullmatch(trace.name)
    return f"comms-step-{match[1]}.jsonl" if match else "comms.jsonl"


def choose_windows(folders: Iterable[Path]) -> list[Path]:
    """One trace per rank folder that has any, all of the same window where that is possible."""
    ranks = [traces for folder in folders if (traces := _windows(folder))]
    if not ranks:
        return []
    chosen = choose_window([set(traces) for traces in ranks], next(iter(ranks[0].values())).parent)
    return [traces.get(chosen) or traces[min(traces)] for traces in ranks]


def choose_window(windows: Sequence[set[int]], first_rank: Path) -> int:
    """Choose, of the windows that every rank has, the one that stands for the run."""
    common = set.intersection(*windows) if windows else set()
    return _most_typical(sorted(common), first_rank) if common else 0


def window_number(name: str) -> int | None:
    """The first recorded step; 0 for the window that every run has, None for other files."""
    regular = _REGULAR.fullmatch(name)
    if regular:
        return int(regular[1])
    return 0 if _FIRST.fullmatch(name) else None


def _windows(folder: Path) -> dict[int, Path]:
    """List windows by the first recorded step; 0 is the window that every run has."""
    windows: dict[int, Path] = {}
    for name in sorted(_names(folder)):
        regular = _REGULAR.fullmatch(name)
        if regular:
            windows[int(regular[1])] = folder / name
        elif _FIRST.fullmatch(name):
            windows.setdefault(0, folder / name)
    return windows


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries]
    except OSError:  # a file, or gone
        return []


def _most_typical(windows: Sequence[int], rank: Path) -> int:
    if len(windows) < 2:
        return windows[0]

    from stepscope.trace.decode import Oddities
    from stepscope.trace.run_folder.step_files import read_step_columns

    steps = read_step_columns(rank, Oddities(STEPS_FILE))
    if steps is None or not steps.plain.any():
        return windows[-1]
    typical = median(steps.step_ns[steps.plain])
    apart = [abs(_level(steps, window) / typical - 1) for window in windows]
    alike = max(_ALIKE, min(apart))
    return max(window for window, far in zip(windows, apart, strict=True) if far <= alike)


def _level(steps: StepColumns, window: int) -> float:
    """The median of the plain steps around a window."""
    import numpy as np

    first = _first_window_step(steps) if window == 0 else window
    near = steps.plain & (np.abs(steps.number - first) <= _AROUND)
    return median(steps.step_ns[near]) if near.any() else float("inf")


def _first_window_step(steps: StepColumns) -> int:
    profiled = steps.number[steps.window]
    return int(profiled[0]) if len(profiled) else 0
