"""A grid of predictions as the page "What if" has it, and what a user does on that page."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from stepscope.explain.explain_job import explain_also
from stepscope.predict.whatif import Bench
from stepscope.predict.whatifs import parse_setting
from stepscope.records.explanation import Explanation
from stepscope.records.figures import significant
from stepscope.records.prediction import Setting
from stepscope.trace.read import read_trace
from stepscope.ui.html.whatif_grid import WhatIfGrid, lay_out
from stepscope.ui.whatif import bench_of, try_each, usual

GOLDEN = Path(__file__).parents[3] / "golden"
TRACE = GOLDEN / "h200-resnet18/rank-00000/trace.json.gz"
CPU = GOLDEN / "cpu_step.json.gz"
HOSTILE = "</script><img src=x onerror=alert(1)>&{{ 7 * 7 }}"


def laid_out(path: Path) -> tuple[Explanation, Bench, WhatIfGrid]:
    explanation = explain_also([path], cache=False)[0]
    rank = explanation.ranks[0]
    bench = bench_of(read_trace(path, cache=False), rank)
    return explanation, bench, lay_out(bench, try_each(bench, usual(bench)), (), rank)


def combinations(grid: WhatIfGrid) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(axis.options)) for axis in grid.axes)))


def settings_of(grid: WhatIfGrid, places: tuple[int, ...]) -> list[Setting]:
    options = [axis.options[place] for axis, place in zip(grid.axes, places, strict=True)]
    return [parse_setting(option.setting) for option in options if option.setting]


def cell(grid: WhatIfGrid, places: tuple[int, ...]) -> dict[str, float | None]:
    at = combinations(grid).index(places)
    return {name: column[at] for name, column in grid.cells.items()}


def shown(page: Any) -> str:
    return str(page.locator('[data-out="step"]').inner_text())


def words(number: float | None) -> str:
    assert number is not None
    return f"{significant(number)} ms"


def places_with(grid: WhatIfGrid, *settings: str) -> tuple[int, ...]:
    """The controls' places for these settings."""
    return tuple(
        next((i for i, o in enumerate(axis.options) if o.setting in settings), axis.now)
        if any(o.setting in settings for o in axis.options)
        else axis.now
        for axis in grid.axes
    )


def pick(page: Any, grid: WhatIfGrid, setting: str) -> None:
    """What a user does to get that setting."""
    axis = next(a for a in grid.axes if any(o.setting == setting for o in a.options))
    place = [option.setting for option in axis.options].index(setting)
    control = page.locator(f'[data-axis="{axis.id}"]')
    if axis.kind == "slider":
        control.fill(str(place))
    elif axis.kind == "switch":
        control.check()
    else:
        control.nth(place).check()
