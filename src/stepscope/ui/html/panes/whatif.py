"""What if: controls over numbers that were predicted where the trace was."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from stepscope.records.prediction import Prediction
from stepscope.text.figures import interval, milliseconds
from stepscope.text.words import sentence
from stepscope.ui.html.pane import Pane, ReportData
from stepscope.ui.html.render import json_block
from stepscope.ui.topics.whatif import (
    BASIS,
    DECISIVE,
    WORTH,
    gain_of,
    judge,
    label,
    saved_ms,
    verdict,
)

if TYPE_CHECKING:
    from stepscope.ui.html.whatif_grid import Axis, WhatIfGrid


def report_view(report: ReportData) -> dict[str, Any] | None:
    """What the template prints."""
    if report.whatif is None:
        return None
    return whatif_view(report.whatif, several=len(report.explanation.ranks) > 1)


def whatif_view(grid: WhatIfGrid, *, several: bool = False) -> dict[str, Any]:
    """`several` when the report is about more than one rank."""
    scaling_axes = grid.scaling_axes if grid.axes or grid.has_links else ()
    reasons = list(dict.fromkeys(axis.why for axis in scaling_axes))
    return {
        "about": _about(grid, several),
        "axes": grid.axes,
        "scaling_axes": scaling_axes,
        # A reason that all controls have is given once.
        "why": reasons[0] if len(reasons) == 1 else "",
        "scaling": grid.has_links,
        "has_buckets": any(axis.id == "bucket-mb" and not axis.why for axis in scaling_axes),
        "has_bandwidth": any(axis.id == "bandwidth" and not axis.why for axis in scaling_axes),
        "who": _who(grid),
        "samples": grid.samples,
        "has_batch": any(axis.id == "batch" for axis in grid.axes),
        "on_host": grid.on_host,
        "memory": any(peak is not None for peak in grid.cells["peak"]),
        "singles": _rows(grid),
        "notes": [_split(refusal) for refusal in grid.refused] + _left_out(grid),
        "data": Markup(_data(grid)),
    }


def _about(grid: WhatIfGrid, several: bool) -> str:
    whose = f"rank {grid.rank}, the slowest" if several else "this trace"
    before = grid.before
    stalls = ""
    if before.baseline_stall_ms:
        stalls = f" (on average, {milliseconds(before.baseline_stall_ms)} of it in stalls)"
    return (
        f"Predicted, not measured: the step of {whose}, replayed with the change made. Now it "
        f"takes {milliseconds(before.baseline_ms)}{stalls}, {BASIS[before.baseline_from]}. "
        "stepscope compare and ab prove whether a change delivers."
    )


def _who(grid: WhatIfGrid) -> str:
    if grid.on_host:
        return "CPU and links" if grid.has_links else "CPU and communication"
    return "CPU, GPU and links" if grid.has_links else "CPU and GPU"


def _rows(grid: WhatIfGrid) -> list[dict[str, Any]]:
    axes = (*grid.axes, *grid.scaling_axes)
    known = {option.setting for axis in axes for option in axis.options if option.setting}
    most = max((abs(saved_ms(single)[0]) for single in grid.singles), default=0.0) or 1.0
    return [_row(single, known, most) for single in grid.singles]


def _row(prediction: Prediction, known: set[str], most: float) -> dict[str, Any]:
    setting = str(prediction.settings[0])
    saved, _, _ = saved_ms(prediction)
    words = verdict(prediction).partition(": ")[0]
    return {
        "label": sentence(label(prediction.settings[0])),
        "setting": setting,
        "settable": setting in known,
        "tone": {"faster": "good", "slower": "bad", "no difference": "none"}[judge(prediction)],
        "step": milliseconds(prediction.predicted_ms),
        "interval": interval(prediction.low_ms, prediction.high_ms),
        "gain": " ".join(filter(None, gain_of(prediction).words())),
        "bar": max(0.0, saved) / most,
        "words": sentence(words.removeprefix(label(prediction.settings[0])).strip()),
    }


def _split(refused: str) -> tuple[str, str]:
    name, colon, reason = refused.partition(": ")
    return (name, sentence(reason)) if colon else ("", sentence(refused))


def _left_out(grid: WhatIfGrid) -> list[tuple[str, str]]:
    if not grid.left_out:
        return []
    names = ", ".join(grid.left_out)
    return [("", f"Not among the controls, for there would be too many combinations: {names}.")]


def _data(grid: WhatIfGrid) -> str:
    """The positions, for whatif.js."""
    axes = (*grid.axes, *grid.scaling_axes)
    lines = dict.fromkeys(line for lines in grid.assumptions for line in lines)
    number = {line: i for i, line in enumerate(lines)}
    body = {
        "axes": [_axis(axis) for axis in grid.axes],
        "scalingAxes": [_axis(axis) | {"why": axis.why} for axis in grid.scaling_axes],
        "at": [_key(axes, places) for places in grid.positions],
        "cells": grid.cells | {"assumed": [[number[s] for s in one] for one in grid.assumptions]},
        "lines": list(lines),
        "workers": grid.workers,
        "batch": grid.batch,
        "samples": grid.samples,
        "limit": grid.limit_bytes,
        "onHost": grid.on_host,
        "path": shlex.join(grid.paths),
        "worth": WORTH,
        "decisive": DECISIVE,
    }
    return json_block(body)


def _key(axes: tuple[Axis, ...], places: tuple[int, ...]) -> int:
    """One number for all controls' places; the last runs fastest."""
    key = 0
    for axis, place in zip(axes, places, strict=True):
        key = key * len(axis.options) + place
    return key


def _axis(axis: Axis) -> dict[str, Any]:
    return {
        "id": axis.id,
        "now": axis.now,
        "labels": [option.label for option in axis.options],
        "ticks": [option.tick for option in axis.options],
        "settings": [option.setting for option in axis.options],
    }


PANE = Pane(id="whatif", title="What if", order=30, view=report_view)
