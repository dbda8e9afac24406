"""How the job is spread over its ranks: a heading and a table per strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from stepscope.ui.strategies import describe_hierarchical, describe_strategies
from stepscope.ui.words import short_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from stepscope.records.hierarchical import HierarchicalAllReduce
    from stepscope.records.strategies import Strategy
    from stepscope.ui.strategies import Section

_LEFT = ("what", "block", "module", "why", "group", "from", "")


def strategy_sections(
    strategies: Sequence[Strategy],
    hierarchical: Sequence[HierarchicalAllReduce] = (),
    *,
    top: int = 8,
    width: int = 100,
) -> list[RenderableType]:
    out: list[RenderableType] = []
    sections = [*describe_strategies(strategies, top), *describe_hierarchical(hierarchical, top)]
    for section in sections:
        out.append(Text.assemble((section.title, "bold"), "  ", section.heading))
        if section.columns:
            out.append(_table(section, width))
        if section.note:
            out.append(Text(section.note, style="bright_black"))
        out.append(Text())
    return out


def _table(section: Section, width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for name in section.columns:
        justify = "left" if name in _LEFT else "right"
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    for row in section.rows:
        *cells, last = row
        table.add_row(*cells, short_kernel(last, max(16, width - 60)))
    return table
