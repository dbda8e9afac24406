"""What torch.compile did, in a terminal: its graphs by line, breaks, and what it compiled again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from stepscope.records.figures import duration, flops, milliseconds, percent
from stepscope.ui.terminal.console import text_line
from stepscope.ui.terminal.tables import fitting_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from stepscope.records.compiled import CompiledWork, RegionTime
    from stepscope.records.place import Place

_LINES_OF_ONE = 3


def compiled_sections(compiled: CompiledWork, *, top: int, width: int) -> list[RenderableType]:
    """Only what there is."""
    out: list[RenderableType] = []
    if compiled.regions:
        out += [_regions(compiled.regions[:top], width), *_explained_share(compiled), Text()]
    if compiled.breaks:
        out += [_breaks(compiled, top, width), Text()]
    if compiled.recompiled:
        out += [_recompiled(compiled, top, width), Text()]
    for eager in compiled.eager[:top]:
        out.append(
            text_line(f"not compiled: {eager.function} {where(eager.place)}: {eager.reason}")
        )
    out += [text_line(note) for note in compiled.notes]
    return out


def _explained_share(compiled: CompiledWork) -> list[RenderableType]:
    if compiled.operator_share is None or compiled.line_share is None:
        return []
    return [
        text_line(
            f"{percent(compiled.operator_share)} of that time has a known operator, "
            f"{percent(compiled.line_share)} a source line"
        )
    ]


def where(place: Place | None) -> str:
    """`train.py:12`, or a dash."""
    return place.short if place else "-"


def _regions(regions: tuple[RegionTime, ...], width: int) -> Table:
    rows = []
    for region in regions:
        which = "backward" if region.backward else "forward"
        known = flops(region.flops) if region.flops is not None else "-"
        rows.append((f"{region.region or '?'} {which}", milliseconds(region.ms), known, ""))
        rows += [
            (
                f"  {where(line.place)}",
                milliseconds((line.share or 0.0) * region.ms),
                flops(line.flops) if line.flops is not None else "-",
                ", ".join(name.removeprefix("aten::") for name in line.operators[:_LINES_OF_ONE]),
            )
            for line in region.lines[:_LINES_OF_ONE]
        ]
    columns = ("compiled graph, line", ">per step", ">FLOPs", "operators")
    return fitting_table("Compiled graphs", columns, rows, width=width, spare=("operators",))


def _breaks(compiled: CompiledWork, top: int, width: int) -> Table:
    rows = [
        (
            where(one.place),
            milliseconds(one.cost_ms) if one.cost_ms is not None else "-",
            one.reason,
        )
        for one in compiled.breaks[:top]
    ]
    return fitting_table(
        "Graph breaks", ("line", ">per step", "what"), rows, width=10 * width, spare=()
    )


def _recompiled(compiled: CompiledWork, top: int, width: int) -> Table:
    rows = [
        (
            f"{one.function} {where(one.place)}",
            f"{one.times:,}",
            duration(1e9 * one.seconds),
            percent(one.seconds / compiled.compile_s) if compiled.compile_s else "-",
            "; ".join(guard.guard for guard in one.guards[:_LINES_OF_ONE]),
        )
        for one in compiled.recompiled[:top]
    ]
    columns = ("function", ">times", ">took", ">of compiling", "what")
    return fitting_table("Compiled again", columns, rows, width=10 * width, spare=())
