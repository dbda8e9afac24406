"""The tables of a SQLite file as columns, in batches; every row before the damage of a damaged one.

Knows nothing of what the tables mean.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.records.trace import ABSENT
from stepscope.trace.times import INVALID_NS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from stepscope.trace.files import Progress

    Int64 = NDArray[np.int64]

BATCH_ROWS = 100_000
TIMES = ("start", "end")  # their absence is no time at all, where other columns have ABSENT

# A damaged schema or a missing tail must not hide the tables before it; nothing is ever written.
_PRAGMAS = ("writable_schema=ON", "cell_size_check=ON", "trusted_schema=OFF")


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of one table; a column that the table lacks is absent in every row."""

    count: int
    columns: dict[str, Int64]
    texts: tuple[str | None, ...] = ()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, name: str) -> Int64:
        found = self.columns.get(name)
        return np.full(self.count, _missing(name), dtype=np.int64) if found is None else found

    def where(self, chosen: NDArray[np.bool_]) -> Rows:
        if chosen.all():
            return self
        texts = tuple(t for t, keep in zip(self.texts, chosen.tolist(), strict=False) if keep)
        columns = {name: values[chosen] for name, values in self.columns.items()}
        return Rows(int(chosen.sum()), columns, texts)

    def with_column(self, name: str, values: Int64) -> Rows:
        return Rows(self.count, {**self.columns, name: values}, self.texts)


class Database:
    """An open file. `damaged` says which tables could not be read to their end, and why."""

    def __init__(self, path: Path) -> None:
        """Raises sqlite3.Error when not even the list of tables can be read."""
        self.damaged: dict[str, str] = {}
        self._size_bytes = path.stat().st_size
        self._progress: Progress | None = None
        self._rows_read = self._rows_in_all = 0
        address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        self._connection = sqlite3.connect(address, uri=True)
        try:
            self._connection.text_factory = partial(str, encoding="utf-8", errors="replace")
            for pragma in _PRAGMAS:
                self._connection.execute(f"PRAGMA {pragma}")
            self.tables = {name: self._columns(name) for name in self._table_names()}
        except sqlite3.Error:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def watch(self, tables: Iterable[str], progress: Progress | None) -> None:
        """Report the share of these tables' rows that `batches` has given, as bytes."""
        self._progress = progress
        for table in tables if progress else ():
            rows = self._all(table, f"SELECT max(rowid) FROM {_quoted(table)}")
            self._rows_in_all += rows[0][0] if rows and isinstance(rows[0][0], int) else 0

    def records(self, table: str, *wanted: str) -> list[tuple[Any, ...]]:
        """The rows of a small table as they are; None for columns that it lacks."""
        have = self.tables.get(table, frozenset())
        if not any(name.lower() in have for name in wanted):
            return []
        select = ", ".join(_quoted(n) if n.lower() in have else "NULL" for n in wanted)
        return self._all(table, f"SELECT {select} FROM {_quoted(table)}")

    def batches(self, table: str, *wanted: str, text: str | None = None) -> Iterator[Rows]:
        """Whole numbers by column, and one column of text; what is neither is absent."""
        have = self.tables.get(table, frozenset())
        names = [name for name in wanted if name.lower() in have]
        if not names:
            return
        select = [f"ifnull({_quoted(name)}, {_missing(name)})" for name in names]
        if text is not None:
            value = _quoted(text) if text.lower() in have else "NULL"
            select.append(f"CASE typeof({value}) WHEN 'text' THEN {value} END")
        for rows in self._fetch(table, f"SELECT {', '.join(select)} FROM {_quoted(table)}"):
            values = list(zip(*rows, strict=True))
            texts = values.pop() if text is not None else ()
            columns = {
                name: _whole_numbers(column, _missing(name))
                for name, column in zip(names, values, strict=True)
            }
            yield Rows(len(rows), columns, texts)
            self._report(len(rows))

    def _table_names(self) -> list[str]:
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND typeof(name) = 'text'"
        names: list[tuple[str]] = []
        for attempt in (1, 2):  # after a failure SQLite goes on with the part that it could load
            names.clear()
            try:
                names.extend(self._connection.execute(query))
                break
            except sqlite3.Error as error:
                self.damaged["sqlite_master"] = str(error)
                if attempt == 2 and not names:
                    raise
        return [name for (name,) in names]

    def _columns(self, table: str) -> frozenset[str]:
        """Names in lower case, since SQLite takes any."""
        rows = self._all(table, f"PRAGMA table_info({_quoted(table)})")
        return frozenset(str(row[1]).lower() for row in rows)

    def _all(self, table: str, query: str) -> list[tuple[Any, ...]]:
        return [row for rows in self._fetch(table, query) for row in rows]

    def _fetch(self, table: str, query: str) -> Iterator[list[tuple[Any, ...]]]:
        try:
            cursor = self._connection.execute(query)
        except sqlite3.Error as error:
            self.damaged[table] = str(error)
            return
        more = True
        while more:
            rows: list[tuple[Any, ...]] = []
            try:
                rows.extend(islice(cursor, BATCH_ROWS))  # keeps the rows before an error
                more = len(rows) == BATCH_ROWS
            except sqlite3.Error as error:
                self.damaged[table] = str(error)
                more = False
            if rows:
                yield rows

    def _report(self, rows: int) -> None:
        self._rows_read += rows
        if self._progress and self._rows_in_all:
            share = min(1.0, self._rows_read / self._rows_in_all)
            self._progress(int(self._size_bytes * share), self._size_bytes)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _missing(column: str) -> int:
    return int(INVALID_NS) if column in TIMES else ABSENT


def _whole_numbers(values: tuple[Any, ...], missing: int) -> Int64:
    try:
        return np.fromiter(values, dtype=np.int64, count=len(values))
    except (TypeError, ValueError, OverflowError):
        whole = (value if isinstance(value, int) else missing for value in values)
        return np.fromiter(whole, dtype=np.int64, count=len(values))
