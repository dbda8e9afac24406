"""Rows of a table, measured one by one and saved at once: a run that is cut goes on where it ended,
and what failed is written beside it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    Row = dict[str, Any]


def saved_rows(path: Path | None) -> list[Row]:
    rows: list[Row] = json.loads(path.read_text()) if path is not None and path.exists() else []
    return rows


def measure_rows(
    cells: Iterable[Row], measure: Callable[[Row], Row], *, path: Path | None, seconds: float
) -> list[Row]:
    """`cells` name what is to be measured, the most telling first; no row is begun after
    `seconds`, and none that is already there is measured again."""
    rows, end = saved_rows(path), time.monotonic() + seconds
    for cell in cells:
        if time.monotonic() > end:
            break
        if any(_is_of(row, cell) and "error" not in row for row in rows):
            continue
        began = time.monotonic()
        try:
            measured = measure(cell)
        except Exception as error:
            measured = {"error": f"{type(error).__name__}: {str(error)[:800]}"}
        row = {**cell, **measured, "took_s": round(time.monotonic() - began, 1)}
        rows = [*(one for one in rows if not _is_of(one, cell)), row]
        print(json.dumps(row), flush=True)
        if path is not None:
            path.write_text(json.dumps(rows, indent=1))
    return rows


def _is_of(row: Row, cell: Row) -> bool:
    return all(row.get(name) == value for name, value in cell.items())
