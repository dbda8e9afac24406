"""The report's page "What if": controls over numbers that were predicted where the trace was."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup

from stepscope.ui.html.whatif_charts import Point, draw_band
from stepscope.ui.whatif import BASIS, figures, interval, judge, label, saved_ms, verdict

if TYPE_CHECKING:
    from stepscope.records.prediction import Prediction, ScalingCurve
    from stepscope.ui.html.whatif_grid import Axis, Series, WhatIfGrid


_LINKS = {
    "carried over": "as calibrated for another number of workers",
    "data sheet": "from the device's data sheet; `stepscope calibrate` measures it",
    "trace": "as seen in this trace",
    "calibrated": "as calibrated",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One change alone."""

    label: str
    setting: str
    settable: bool
    tone: str
    step: str
    interval: str
    saves: str
    bar: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A change by degrees."""

    title: str
    svg: Markup
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfView:
    """What the template prints."""

    about: str
    axes: tuple[Axis, ...]
    batch: int | None
    has_batch: bool
    on_host: bool
    memory: bool
    singles: list[Row]
    charts: list[Chart]
    notes: list[tuple[str, str]]  # which change, and why not
    data: Markup


def whatif_page(grid: WhatIfGrid, *, several: bool = False) -> Markup:
    """The whole section; `several` when the report is about more than one rank."""
    return Markup(_template().render(view=_view(grid, several)))


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = files("stepscope.ui.html").joinpath("whatif.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source)


def _view(grid: WhatIfGrid, several: bool) -> WhatIfView:
    return WhatIfView(
        about=_about(grid, several),
        axes=grid.axes,
        batch=grid.batch,
        has_batch=any(axis.id == "batch" for axis in grid.axes),
        on_host=grid.on_host,
        memory=any(peak is not None for peak in grid.cells["peak"]),
        singles=_rows(grid),
        charts=_charts(grid),
        notes=[_split(each) for each in grid.refused] + _left_out(grid),
        data=Markup(_data(grid)),
    )


def _about(grid: WhatIfGrid, several: bool) -> str:
    whose = f"rank {grid.rank}, which decides the step" if several else "this trace"
    before = grid.before
    return (
        f"Predicted, not measured: the step of {whose}, replayed with the change made. Now it "
        f"takes {figures(before.baseline_ms)} ms, {BASIS[before.baseline_from]}. "
        "stepscope compare and ab prove what came of it."
    )


def _charts(grid: WhatIfGrid) -> list[Chart]:
    """More workers first, where the curve is more than the step as it is."""
    now = grid.before.baseline_ms
    found = [_chart(each, now) for each in grid.series]
    if grid.scaling and len(grid.scaling.points) > 2:
        found.insert(0, _scaling(grid.scaling, now))
    return found


def _scaling(curve: ScalingCurve, now_ms: float) -> Chart:
    points = [
        Point(
            label=f"{each.workers} now" if each.workers == curve.present else str(each.workers),
            value=each.step_ms,
            low=each.low_ms,
            high=each.high_ms,
            under=f"{each.efficiency:.0%}",
        )
        for each in curve.points
    ]
    title = "More workers, the same batch together" if curve.strong else "More workers"
    svg = draw_band(
        points, title=title, across="workers, and the pace of each", unit="ms", now=now_ms
    )
    link = curve.points[-1].basis
    return Chart(
        title=title,
        svg=svg,
        caption="The step with so many replicas, each with its batch, gradients summed by DDP. "
        "Pace: a worker's samples a second, over now. "
        f"What links can do: {_LINKS.get(link, link)}.",
    )


def _chart(series: Series, now_ms: float) -> Chart:
    points = [
        Point(
            label=each.settings[0].value.removeprefix("x"),
            value=each.predicted_ms,
            low=each.low_ms,
            high=each.high_ms,
        )
        for each in series.points
    ]
    svg = draw_band(points, title=series.label, across=series.across, unit="ms", now=now_ms)
    return Chart(
        title=series.label,
        svg=svg,
        caption="The step with this change alone. The band is where it lies with 95%.",
    )


def _rows(grid: WhatIfGrid) -> list[Row]:
    known = {option.setting for axis in grid.axes for option in axis.options if option.setting}
    most = max((abs(saved_ms(each)[0]) for each in grid.singles), default=0.0) or 1.0
    return [_row(each, known, most) for each in grid.singles]


def _row(prediction: Prediction, known: set[str], most: float) -> Row:
    setting = str(prediction.settings[0])
    saved, low, high = saved_ms(prediction)
    found = judge(prediction)
    words = verdict(prediction).partition(": ")[0]
    return Row(
        label=_sentence(label(prediction.settings[0])),
        setting=setting,
        settable=setting in known,
        tone={"faster": "good", "slower": "bad", "no difference": "none"}[found],
        step=f"{figures(prediction.predicted_ms)} ms",
        interval=interval(prediction.low_ms, prediction.high_ms),
        saves=f"{figures(saved)} ms ({interval(low, high)})",
        bar=max(0.0, saved) / most,
        words=_sentence(words.removeprefix(label(prediction.settings[0])).strip()),
    )


def _split(refused: str) -> tuple[str, str]:
    name, colon, reason = refused.partition(": ")
    return (name, _sentence(reason)) if colon else ("", _sentence(refused))


def _left_out(grid: WhatIfGrid) -> list[tuple[str, str]]:
    if not grid.left_out:
        return []
    names = ", ".join(grid.left_out)
    return [("", f"Not among the controls, for there would be too many combinations: {names}.")]


def _data(grid: WhatIfGrid) -> str:
    """The cells for the script; no character that could end its element."""
    before = grid.before
    body = {
        "axes": [
            {
                "id": axis.id,
                "now": axis.now,
                "labels": [option.label for option in axis.options],
                "settings": [option.setting for option in axis.options],
            }
            for axis in grid.axes
        ],
        "cells": grid.cells,
        "step": before.baseline_ms,
        "batch": grid.batch,
        "limit": grid.limit_bytes,
        "onHost": grid.on_host,
        "assumptions": grid.assumptions,
        "path": shlex.quote(grid.path),
    }
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def _sentence(text: str) -> str:
    """A capital for a plain first word; names such as torch.compile and bf16 keep theirs."""
    return text[:1].upper() + text[1:] if re.match(r"[a-z]+( |$|,)", text) else text
