"""A table as the page takes it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


def make_table(
    title: str,
    columns: str,
    rows: Iterable[tuple[Any, ...]],
    *,
    sort: int,
    absent: str = "",
    events: bool = False,
) -> dict[str, Any]:
    """`columns`: "label:type | ...", with types that table_box.js knows.

    `sort` is a column, the largest first, or -1 for none. `events`: the first column names events
    that the timeline can search for.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    return {
        "id": title.lower().replace(",", "").replace(" ", "-"),
        "title": title,
        "columns": [column.split(":") for column in columns.split(" | ")],
        "rows": cells,
        "sort": sort,
        "absent": "" if cells else absent,
        "events": events,
    }


def _cell(value: Any) -> Any:
    """JSON has no word for infinity: a rate over no time is absent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
