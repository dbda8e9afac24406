"""Efficiency in a terminal: MFU, the dtypes that did the work, and the widest gaps to the roof."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from stepscope.explain.efficiency import above_peak
from stepscope.explain.shapes import which_call
from stepscope.records.figures import duration, flop_rate, flops, percent
from stepscope.ui.efficiency import (
    MFU_WORDS,
    against_fastest,
    gaps,
    headline,
    share_of_peak,
    share_of_roof,
)
from stepscope.ui.terminal.tables import titled_table
from stepscope.ui.words import short_kernel

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from stepscope.records.efficiency import Efficiency

MOST_GAPS = 5
_WIDE = 80
_FIXED = 52  # characters taken by everything but names and shapes


def efficiency_sections(efficiency: Efficiency, *, width: int) -> list[RenderableType]:
    """The line about MFU, and the tables that have rows."""
    out: list[RenderableType] = [_headline(efficiency)]
    if efficiency.by_dtype:
        out.append(_dtypes(efficiency, width))
    out.append(Text())
    if gaps(efficiency, 1):
        out += [_gaps(efficiency, width), Text()]
    return out


def _headline(efficiency: Efficiency) -> Text:
    text = Text("efficiency  ", style="bold")
    text.append(headline(efficiency), style="")
    wrong = bool(above_peak(efficiency))
    if efficiency.hfu is not None and efficiency.recomputed_flops and not wrong:
        text.append(f", HFU {percent(efficiency.hfu)} counting recomputed work")
    if efficiency.mfu is not None and not wrong:
        text.append(f"\n{MFU_WORDS} {against_fastest(efficiency)}".rstrip(), style="bright_black")
    if efficiency.unknown_share >= 0.05:
        text.append(
            f" {percent(efficiency.unknown_share)} of device time is in kernels whose FLOPs are "
            "not known.",
            style="bright_black",
        )
    return text


def _dtypes(efficiency: Efficiency, width: int) -> Table:
    columns = ["dtype", ">time", ">rate", ">of peak"]
    if width >= _WIDE:
        columns += [">FLOPs per step", ">tensor cores"]
    table = titled_table("", *columns)
    for use in efficiency.by_dtype:
        reached = use.flops / (use.device_ns / 1e9) if use.device_ns else None
        known = use.device_ns and efficiency.tensor_core_share is not None
        cells = [
            use.dtype,
            duration(use.device_ns),
            "-" if reached is None else flop_rate(reached),
            "-"
            if reached is None or not use.peak_flops
            else share_of_peak(reached / use.peak_flops),
            flops(use.flops),
            percent(use.tensor_core_ns / use.device_ns) if known else "-",
        ]
        table.add_row(*cells[: len(columns)])
    return table


def _gaps(efficiency: Efficiency, width: int) -> Table:
    columns = [">gap", ">time", ">of roof", "bound", "dtype", "operator"]
    if width >= 90:
        columns.append("shapes, line")
    table = titled_table("widest gaps to the roof, per step", *columns)
    room = max(28, width - _FIXED)
    for spot in gaps(efficiency, MOST_GAPS):
        cells = [
            duration(spot.gap_ns or 0.0),
            duration(spot.device_ns),
            share_of_roof(spot),
            spot.bound,
            spot.dtype or "-",
            short_kernel(spot.operator, room * 4 // 7),
        ]
        if width >= 90:
            cells.append(short_kernel(which_call(spot), room * 3 // 7))
        table.add_row(*cells)
    return table
