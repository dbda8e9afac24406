"""Bars drawn with characters: one for the step's parts, one for what memory holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from stepscope.records.figures import percent
from stepscope.records.step_parts import STEP_PARTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.explanation import Budget

COLOURS = {name: part.ansi for name, part in STEP_PARTS.items()}
# A character for each part, for terminals without colours.
FILLS = dict(zip(COLOURS, "█▓▒╳≡░▪·─ ▤▦▧▨▩▥◆◇●○◧◨◫", strict=True))


def draw_bar(parts: Sequence[tuple[float, str, str]], width: int) -> Text:
    """Each part is (share, character, colour); a visible part gets at least one cell."""
    text = Text()
    cells = cells_per_part([share for share, _, _ in parts], width)
    for (_, fill, colour), count in zip(parts, cells, strict=True):
        text.append(fill * count, style=colour)
    return text


def budget_bar(budget: Budget, width: int) -> Text:
    """The whole step across the whole width."""
    parts = [(part.share, FILLS[part.id], COLOURS[part.id]) for part in budget.parts]
    return draw_bar(parts, width)


def draw_legend(
    parts: Sequence[tuple[str, str, str, str, float]], width: int, *, room: int
) -> Table:
    """Each part is (character, colour, label, value, share) and takes `room` columns."""
    columns = max(1, (width + 2) // room)
    grid = Table.grid(padding=(0, 2))
    for _ in range(columns):
        grid.add_column(no_wrap=True)
    cells = [
        Text.assemble(
            (f"{fill} ", colour),
            label,
            (f"{value:>10}{percent(share):>6}", "bold" if share >= 0.1 else ""),
        )
        for fill, colour, label, value, share in parts
    ]
    for i in range(0, len(cells), columns):
        grid.add_row(*cells[i : i + columns])
    return grid


def cells_per_part(shares: list[float], width: int) -> list[int]:
    """Whole cells that add up to the width: the largest remainders get what rounding left."""
    exact = [share * width for share in shares]
    cells = [max(int(value), 1 if value >= 0.5 else 0) for value in exact]
    order = sorted(range(len(cells)), key=lambda i: cells[i] - exact[i])
    for i in order[: max(0, width - sum(cells))]:
        cells[i] += exact[i] > 0
    while sum(cells) > width:
        cells[cells.index(max(cells))] -= 1
    return cells
