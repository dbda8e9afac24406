"""A grid of predictions as the page "What if" has it, and what a user does on that page."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from stepscope.explain.explain_job import JobTraces, explain_job
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.predict.engine import Bench
from stepscope.records.explanation import Explanation
from stepscope.records.prediction import Setting
from stepscope.text.figures import milliseconds
from stepscope.trace.read import ReadOptions, read_rank_inputs
from stepscope.ui.advice import advise_slowest
from stepscope.ui.html.panes.whatif import whatif_view
from stepscope.ui.html.render import render_part
from stepscope.ui.html.whatif_grid import WhatIfGrid, lay_out, settings_at
from stepscope.ui.topics.whatif import make_bench, try_each, usual

GOLDEN = Path(__file__).parents[3] / "golden"
TRACE = GOLDEN / "h200-resnet18/rank-00000/trace.json.gz"
CPU = GOLDEN / "cpu_step.json.gz"
HOSTILE = "</script><img src=x onerror=alert(1)>&{{ 7 * 7 }}"


def laid_out(path: Path) -> tuple[Explanation, Bench, WhatIfGrid]:
    explanation = explain_job(path, cache=False)
    rank = explanation.ranks[0]
    bench = make_bench(RankAnalysis(read_rank_inputs(path, ReadOptions(cache=False))), rank)
    return explanation, bench, lay_out(bench, try_each(bench, usual(bench)), (), rank)


def lay_out_slowest(path: Path) -> tuple[Explanation, WhatIfGrid]:
    """As `explain --html` does: of several ranks, the one that `whatif` changes."""
    traces = JobTraces([path], cache=False)
    explanation, _ = traces.explain()
    advice = advise_slowest(traces, explanation, draw=True)
    assert advice is not None
    assert advice.page is not None
    return explanation, advice.page


def pane_text(grid: WhatIfGrid, *, several: bool = False) -> str:
    return str(render_part("whatif.html.j2", view=whatif_view(grid, several=several)))


def combinations(grid: WhatIfGrid) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(axis.options)) for axis in grid.axes)))


def settings_of(grid: WhatIfGrid, places: tuple[int, ...]) -> list[Setting]:
    return settings_at(grid.axes, places)


def cell(grid: WhatIfGrid, places: tuple[int, ...]) -> dict[str, float | None]:
    """What is predicted at these places, with workers and links as now."""
    at = grid.positions.index((*places, *(axis.now for axis in grid.scaling_axes)))
    return {name: column[at] for name, column in grid.cells.items()}


def shown(page: Any) -> str:
    return str(page.locator('[data-out="step"]').inner_text())


def words(number: float | None) -> str:
    assert number is not None
    return milliseconds(number)


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
