"""The tables of a SQLite file as columns, in batches. A damaged table gives its rows up to there.

Knows nothing of what the tables mean. The file may come from anybody: only plain tables are read,
never a view, a virtual table or a computed column, so nothing in the file is ever executed; and no
table gives more rows or text than the file has room for.
"""

from __future__ import annotations

import re
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stepscope.records.trace import ABSENT, Flags, Int64
from stepscope.trace.files import Progress
from stepscope.trace.formats.plausible_values import INVALID_NS, OddValues

BATCH_ROWS = 20_000
TIMES = ("start", "end")  # absent values are INVALID_NS here and ABSENT in other columns
MAX_CHARACTERS = 1 << 16  # of one text; the rest is cut off
ANY = 2**63 - 1

# A damaged schema or a missing end must not hide the tables before it; nothing is ever written.
_PRAGMAS = ("writable_schema=ON", "cell_size_check=ON", "trusted_schema=OFF", "query_only=ON")
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 4 << 20,  # of one value
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_FUNCTIONS = ("ifnull", "typeof", "substr", "max", "json_group_array")
_PLAIN = re.compile(r"\s*CREATE\s+TABLE\b", re.IGNORECASE)
_MIN_ROW_BYTES = 6  # two for its cell, two for the pointer to it, a header, a value
_MIN_TEXT_BYTES = 1 << 20
_MIN_OPERATIONS = 10_000_000
_OPERATIONS_PER_BYTE = 50
_OPERATIONS_AT_ONCE = 1_000_000
_NUMBERS = msgspec.json.Decoder(list[int])
_FAILURES = (sqlite3.Error, sqlite3.Warning, MemoryError)


@dataclass(frozen=True, slots=True)
class TableRows:
    """Some rows of one table; a column that the table lacks is absent in every row."""

    count: int
    columns: dict[str, Int64]
    texts: tuple[str | None, ...] = ()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, name: str) -> Int64:
        values = self.columns.get(name)
        return np.broadcast_to(np.int64(_missing(name)), self.count) if values is None else values

    def where(self, chosen: Flags) -> TableRows:
        if chosen.all():
            return self
        texts = tuple(t for t, keep in zip(self.texts, chosen.tolist(), strict=False) if keep)
        columns = {name: values[chosen] for name, values in self.columns.items()}
        return TableRows(int(chosen.sum()), columns, texts)

    def with_column(self, name: str, values: Int64) -> TableRows:
        return TableRows(self.count, {**self.columns, name: values}, self.texts)


@dataclass(frozen=True, slots=True)
class _BatchColumn:
    """A column of a batch, and the number of the batch's first row."""

    table: str
    column: str
    first: int

    def row(self, at: int) -> str:
        return f"row {self.first + at:,}"

    def __str__(self) -> str:
        return f"{self.table}.{self.column}"


class Database:
    """An open file. `damaged` maps tables that could not be read to their end to the reason."""

    def __init__(self, path: Path) -> None:
        """Raises sqlite3.Error if the list of tables cannot be read."""
        self.damaged: dict[str, str] = {}
        self.cut_texts = 0
        self.unfinished = _find_log(path)
        self._size_bytes = path.stat().st_size
        self._text_bytes_left = 2 * self._size_bytes + _MIN_TEXT_BYTES  # UTF-16 may grow
        self._operations_left = _MIN_OPERATIONS
        self._progress: Progress | None = None
        self._rows_read = self._all_rows = 0
        self._columns_of: dict[str, frozenset[str]] = {}
        address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        self._connection = sqlite3.connect(address, uri=True)
        try:
            # Allow SQLite to read plain tables and nothing else.
            self._connection.text_factory = self._decode_text
            for limit, most in _LIMITS.items():
                self._connection.setlimit(limit, most)
            for pragma in _PRAGMAS:
                self._connection.execute(f"PRAGMA {pragma}")
            self._connection.set_authorizer(_authorize)
            self._connection.set_progress_handler(self._gives_up, _OPERATIONS_AT_ONCE)
            self.tables, self.computed = self._list_tables()
        except sqlite3.Error:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def watch(self, tables: Iterable[str], progress: Progress | None) -> None:
        """Report progress through the rows of these tables, as bytes of the file."""
        self._progress = progress
        for table in tables if progress else ():
            try:
                query = f"SELECT max(rowid) FROM {_quoted(table)}"
                (last,) = self._connection.execute(query).fetchone()
            except _FAILURES:  # reading the table will report it
                continue
            self._all_rows += last if isinstance(last, int) and last > 0 else 0

    def columns(self, table: str) -> frozenset[str]:
        """Names in lower case, since SQLite ignores case; without computed columns."""
        if table not in self._columns_of and table in self.tables:
            rows = self._all(table, f"PRAGMA table_info({_quoted(table)})")
            self._columns_of[table] = frozenset(str(row[1]).lower() for row in rows)
        return self._columns_of.get(table, frozenset())

    def records(self, table: str, *wanted: str) -> list[tuple[Any, ...]]:
        """The rows of a small table, unchanged; None for columns that it lacks."""
        have = self.columns(table)
        if not any(name.lower() in have for name in wanted):
            return []
        select = (_number_or_text(n) if n.lower() in have else "NULL" for n in wanted)
        return self._all(table, _query(table, select))

    def batches(
        self, table: str, wanted: Mapping[str, int], odd: OddValues, *, text: str | None = None
    ) -> Iterator[TableRows]:
        """Batches of whole numbers by column, and one column of text; other values are absent.

        A negative number, or one above the limit of its column in `wanted`, is absent and counted.
        """
        have = self.columns(table)
        names = [name for name in wanted if name.lower() in have]
        if not names:
            return
        first = 1
        for values, texts in self._values(table, names, text):
            if not len(values[0]):
                continue
            columns = {}
            for name, column in zip(names, values, strict=True):
                place = _BatchColumn(table, name, first)
                numbers = np.empty(len(column), np.int64)
                try:
                    struct.pack_into(f"{len(column)}q", numbers.data, 0, *column)
                except struct.error:
                    missing = _missing(place.column)
                    numbers[:] = [value if isinstance(value, int) else missing for value in column]
                    wrong = [at for at, value in enumerate(column) if not isinstance(value, int)]
                    odd.add(str(place), len(wrong), column[wrong[0]], place.row(wrong[0]))
                columns[name] = _limited(numbers, wanted[name], place, odd)
            count = len(values[0])
            yield TableRows(count, columns, texts)
            first += count
            self._rows_read += count
            if self._progress and self._all_rows:
                share = min(1.0, self._rows_read / self._all_rows)
                self._progress(int(self._size_bytes * share), self._size_bytes)

    def _values(
        self, table: str, names: list[str], text: str | None
    ) -> Iterator[tuple[Sequence[Sequence[Any]], tuple[str | None, ...]]]:
        """Column by column: in fast pieces while they hold whole numbers, then row by row."""
        select = [f"ifnull({_quoted(name)}, {_missing(name)})" for name in names]
        after = None
        rows_left = self._max_rows()
        while text is None and rows_left >= 0:
            piece = self._piece(table, select, after)
            if piece is None:
                break
            last, values = piece
            rows_left -= len(values[0])
            yield values, ()
            if len(values[0]) < BATCH_ROWS:
                return
            if after is not None and last <= after:
                self.damaged[table] = "its rows are not in the order of their numbers"
                return
            after = last
        if text is not None:
            select.append(_text(text) if text.lower() in self.columns(table) else "NULL")
        for rows in self._fetch(table, _query(table, select, after), rows_left):
            columns = list(zip(*rows, strict=True))
            texts = columns.pop() if text is not None else ()
            yield columns, texts

    def _piece(
        self, table: str, select: list[str], after: int | None
    ) -> tuple[int, list[list[int]]] | None:
        """The last row's number and the columns of the next rows; None if this way fails.

        SQLite writes each column as one JSON text, which takes half as long as tuples of numbers.
        """
        if "_rowid_" in self.columns(table):
            return None
        inner = [f"{value} AS c{place}" for place, value in enumerate(select)]
        lists = (f"CAST(json_group_array(c{place}) AS BLOB)" for place in range(len(select)))
        rows = _query(table, ["_rowid_ AS r", *inner], after)
        query = f"SELECT max(r), {', '.join(lists)} FROM ({rows} LIMIT {BATCH_ROWS})"
        try:
            last, *texts = self._connection.execute(query).fetchone()
            return last or 0, [_NUMBERS.decode(text) for text in texts]
        except (*_FAILURES, msgspec.DecodeError):
            return None

    def _decode_text(self, text: bytes) -> str:
        self._text_bytes_left -= len(text)
        if self._text_bytes_left < 0:
            raise sqlite3.DataError("more text than the file has room for")
        decoded = text.decode("utf-8", "replace")
        if len(decoded) > MAX_CHARACTERS:
            self.cut_texts += 1
            return decoded[:MAX_CHARACTERS]
        return decoded

    def _gives_up(self) -> int:
        """SQLite calls this now and then, and stops unless it returns zero."""
        self._operations_left -= _OPERATIONS_AT_ONCE
        return int(self._operations_left < 0)

    def _list_tables(self) -> tuple[frozenset[str], frozenset[str]]:
        """The names of plain tables, and of views and virtual tables, which compute their rows."""
        query = (
            "SELECT name, type = 'table' AND rootpage > 0, substr(sql, 1, 100) FROM sqlite_master "
            "WHERE type IN ('table', 'view') AND typeof(name) = 'text'"
        )
        rows: list[tuple[str, int | None, Any]] = []
        for attempt in (1, 2):  # after a failure SQLite continues with the part it could load
            rows.clear()
            try:
                rows.extend(self._connection.execute(query))
                break
            except sqlite3.Error as error:
                self.damaged["sqlite_master"] = str(error)
                if attempt == 2 and not rows:
                    raise
        plain = {name for name, stored, sql in rows if stored and _PLAIN.match(str(sql))}
        names = frozenset(name for name, *_ in rows if "\0" not in name)
        return names & plain, names - plain

    def _all(self, table: str, query: str) -> list[tuple[Any, ...]]:
        return [row for rows in self._fetch(table, query, self._max_rows()) for row in rows]

    def _max_rows(self) -> int:
        """The most rows that one table can have; also resets SQLite's budget of operations."""
        self._operations_left = _MIN_OPERATIONS + _OPERATIONS_PER_BYTE * self._size_bytes
        return self._size_bytes // _MIN_ROW_BYTES

    def _fetch(self, table: str, query: str, rows_left: int) -> Iterator[list[tuple[Any, ...]]]:
        try:
            cursor = self._connection.execute(query)
        except _FAILURES as error:
            self.damaged[table] = str(error)
            return
        more = True
        while more:
            rows: list[tuple[Any, ...]] = []
            try:
                rows.extend(islice(cursor, BATCH_ROWS))  # keeps the rows before an error
                more = len(rows) == BATCH_ROWS
            except _FAILURES as error:
                self.damaged[table] = str(error)
                more = False
            rows_left -= len(rows)
            if rows_left < 0:
                self.damaged[table] = "more rows than the file has room for"
                return
            if rows:
                yield rows


def _find_log(path: Path) -> str | None:
    """The name of a log that a writer left: it is not read, so the file may lack rows."""
    for suffix in ("-wal", "-journal"):
        log = path.with_name(path.name + suffix)
        try:
            if log.stat().st_size:
                return log.name
        except OSError:
            continue
    return None


def _authorize(action: int, _: Any, detail: str | None, __: Any, view: str | None) -> int:
    """Allow reading columns and a few functions, unless `view` names a view that asks for it."""
    allowed = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_PRAGMA)
    allowed |= action == sqlite3.SQLITE_FUNCTION and detail in _FUNCTIONS
    return sqlite3.SQLITE_OK if allowed and view is None else sqlite3.SQLITE_DENY


def _query(table: str, select: Iterable[str], after: int | None = None) -> str:
    rest = "" if after is None else f" WHERE _rowid_ > {after}"
    return f"SELECT {', '.join(select)} FROM {_quoted(table)} NOT INDEXED{rest}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(name: str) -> str:
    """One character longer than what is kept, to see whether it was cut."""
    value = _quoted(name)
    return f"CASE typeof({value}) WHEN 'text' THEN substr({value}, 1, {MAX_CHARACTERS + 1}) END"


def _number_or_text(name: str) -> str:
    value = _quoted(name)
    return f"CASE typeof({value}) WHEN 'integer' THEN {value} ELSE {_text(name)} END"


def _missing(column: str) -> int:
    return int(INVALID_NS) if column in TIMES else ABSENT


def _limited(numbers: Int64, most: int, place: _BatchColumn, odd: OddValues) -> Int64:
    if place.column in TIMES or (numbers.min() >= ABSENT and numbers.max() <= most):
        return numbers
    outside = (numbers < ABSENT) | (numbers > most)
    first = int(outside.argmax())
    odd.add(str(place), int(outside.sum()), int(numbers[first]), place.row(first))
    return np.where(outside, ABSENT, numbers)
