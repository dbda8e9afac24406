"""The report's page "What if": controls over numbers that were predicted where the trace was."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from stepscope.records.figures import interval, significant
from stepscope.records.words import sentence
from stepscope.ui.html.whatif_scaling import encode_crew
from stepscope.ui.whatif import BASIS, judge, label, saved_ms, verdict

if TYPE_CHECKING:
    from stepscope.records.prediction import Prediction
    from stepscope.ui.html.whatif_axes import Axis
    from stepscope.ui.html.whatif_grid import WhatIfGrid


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
class WhatIfView:
    """What the template prints."""

    about: str
    axes: tuple[Axis, ...]
    crew_axes: tuple[Axis, ...]
    why: Markup  # workers and links cannot be moved
    crew: str  # what the page computes with, where they can
    has_buckets: bool
    who: str
    batch: int | None
    has_batch: bool
    on_host: bool
    memory: bool
    singles: list[Row]
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
    crew = grid.crew
    crew_axes = crew.axes if crew and (grid.axes or crew.crew) else ()
    return WhatIfView(
        about=_about(grid, several),
        axes=grid.axes,
        crew_axes=crew_axes,
        why=_commands(sentence(crew.why)) if crew else Markup(""),
        crew=encode_crew(crew, grid.crew_cells) if crew and crew.crew else "",
        has_buckets=any(axis.id == "bucket-mb" and not axis.why for axis in crew_axes),
        who=_who(grid),
        batch=grid.batch,
        has_batch=any(axis.id == "batch" for axis in grid.axes),
        on_host=grid.on_host,
        memory=any(peak is not None for peak in grid.cells["peak"]),
        singles=_rows(grid),
        notes=[_split(each) for each in grid.refused] + _left_out(grid),
        data=Markup(_data(grid)),
    )


def _about(grid: WhatIfGrid, several: bool) -> str:
    whose = f"rank {grid.rank}, the slowest" if several else "this trace"
    before = grid.before
    return (
        f"Predicted, not measured: the step of {whose}, replayed with the change made. Now it "
        f"takes {significant(before.baseline_ms)} ms, {BASIS[before.baseline_from]}. "
        "stepscope compare and ab prove whether it does."
    )


def _who(grid: WhatIfGrid) -> str:
    links = grid.crew is not None and grid.crew.crew is not None
    if grid.on_host:
        return "Host and links" if links else "Host and communication"
    return "Host, device and links" if links else "Host and device"


def _rows(grid: WhatIfGrid) -> list[Row]:
    axes = (*grid.axes, *(grid.crew.axes if grid.crew and grid.crew.crew else ()))
    known = {option.setting for axis in axes for option in axis.options if option.setting}
    most = max((abs(saved_ms(each)[0]) for each in grid.singles), default=0.0) or 1.0
    return [_row(each, known, most) for each in grid.singles]


def _row(prediction: Prediction, known: set[str], most: float) -> Row:
    setting = str(prediction.settings[0])
    saved, low, high = saved_ms(prediction)
    found = judge(prediction)
    words = verdict(prediction).partition(": ")[0]
    return Row(
        label=sentence(label(prediction.settings[0])),
        setting=setting,
        settable=setting in known,
        tone={"faster": "good", "slower": "bad", "no difference": "none"}[found],
        step=f"{significant(prediction.predicted_ms)} ms",
        interval=interval(prediction.low_ms, prediction.high_ms),
        saves=f"{significant(saved)} ms ({interval(low, high)})",
        bar=max(0.0, saved) / most,
        words=sentence(words.removeprefix(label(prediction.settings[0])).strip()),
    )


def _split(refused: str) -> tuple[str, str]:
    name, colon, reason = refused.partition(": ")
    return (name, sentence(reason)) if colon else ("", sentence(refused))


def _left_out(grid: WhatIfGrid) -> list[tuple[str, str]]:
    if not grid.left_out:
        return []
    names = ", ".join(grid.left_out)
    return [("", f"Not among the controls, for there would be too many combinations: {names}.")]


def _data(grid: WhatIfGrid) -> str:
    """The cells for the script; no character that could end its element."""
    before = grid.before
    body = {
        "axes": [_axis(axis) for axis in grid.axes],
        "crewAxes": [
            _axis(axis) | {"why": axis.why} for axis in (grid.crew.axes if grid.crew else ())
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


def _axis(axis: Axis) -> dict[str, Any]:
    return {
        "id": axis.id,
        "now": axis.now,
        "labels": [option.label for option in axis.options],
        "settings": [option.setting for option in axis.options],
    }


def _commands(text: str) -> Markup:
    """What stands between backticks is typed."""
    parts = [escape(part) for part in text.split("`")]
    pieces = [Markup("<code>{}</code>").format(p) if i % 2 else p for i, p in enumerate(parts)]
    return Markup("").join(pieces)
