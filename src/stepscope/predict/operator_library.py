"""The library of operator times: one SQLite file in the user's folder.

A library that is locked, damaged or not permitted is never an error for a prediction: it is
reported in a sentence, and the prediction is made without it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

import msgspec

from stepscope.records.operator_times import OperatorTime, Output, PassTime
from stepscope.records.user_folders import user_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_WAIT_S = 2.0  # for another process that writes
_KEY = ("name", "shapes", "strides", "dtypes", "concrete", "grads", "mode")
_VALUES = (
    *("forward_ns", "forward_spread", "forward_repeats"),
    *("backward_ns", "backward_spread", "backward_repeats"),
    *("outputs", "host_ns", "source", "when_unix"),
)
_COLUMNS = (*_KEY, "place", "software", *_VALUES)
_CREATE = f"""CREATE TABLE IF NOT EXISTS operator_times (
    {", ".join(_COLUMNS)}, PRIMARY KEY ({", ".join((*_KEY, "place", "software"))}))"""
_PUT = f"""INSERT OR REPLACE INTO operator_times ({", ".join(_COLUMNS)})
    VALUES ({", ".join("?" * len(_COLUMNS))})"""


class LibraryProblemError(Exception):
    """The library cannot be used; the text says why and what to do."""


def library_file() -> Path:
    """In $STEPSCOPE_LIBRARY, else in the user's folder for data."""
    folder = user_folder("STEPSCOPE_LIBRARY", "library", "XDG_DATA_HOME", "~/.local/share")
    return folder / "operators.sqlite"


def save_times(times: Sequence[OperatorTime]) -> None:
    """Newer times of the same call, place and software replace older ones."""
    with _opened(create=True) as store:
        store.executemany(_PUT, [_as_row(time) for time in times])


def read_times(*, place: str | None = None, mode: str | None = None) -> list[OperatorTime]:
    """All times, or those of one place and mode. A library that does not exist is empty."""
    if not library_file().exists():
        return []
    wanted = {"place": place, "mode": mode}
    given = {name: value for name, value in wanted.items() if value is not None}
    where = " AND ".join(f"{name} = ?" for name in given) or "1"
    query = f"SELECT {', '.join(_COLUMNS)} FROM operator_times WHERE {where} ORDER BY when_unix"
    with _opened() as store:
        rows = store.execute(query, tuple(given.values())).fetchall()
    try:
        return [_from_row(dict(zip(_COLUMNS, row, strict=True))) for row in rows]
    except (msgspec.MsgspecError, TypeError, ValueError):
        raise LibraryProblemError(_damaged()) from None


def read_places() -> list[str]:
    """The devices that the library has times of."""
    if not library_file().exists():
        return []
    with _opened() as store:
        rows = store.execute("SELECT DISTINCT place FROM operator_times ORDER BY place").fetchall()
    return [str(place) for (place,) in rows]


@contextlib.contextmanager
def _opened(*, create: bool = False) -> Iterator[sqlite3.Connection]:
    file = library_file()
    try:
        if create:
            file.parent.mkdir(parents=True, exist_ok=True)
        store = sqlite3.connect(file, timeout=_WAIT_S)
    except (OSError, sqlite3.Error) as error:
        raise LibraryProblemError(f"the library {file} cannot be opened: {error}") from None
    try:
        with store:
            store.execute(_CREATE)
            _add_columns(store)
            yield store
    except sqlite3.OperationalError as error:
        if "locked" in str(error) or "busy" in str(error):
            why = f"the library {file} is locked by another process. Try again when that has ended"
        else:
            why = f"the library {file} cannot be used: {error}"
        raise LibraryProblemError(why) from None
    except sqlite3.DatabaseError:
        raise LibraryProblemError(_damaged()) from None
    finally:
        store.close()


def _add_columns(store: sqlite3.Connection) -> None:
    """A library of an earlier version lacks the newest ones."""
    there = {name for _, name, *_ in store.execute("PRAGMA table_info(operator_times)")}
    for name in _VALUES:
        if name not in there:
            store.execute(f"ALTER TABLE operator_times ADD COLUMN {name}")


def _damaged() -> str:
    return f"the library {library_file()} is damaged. Remove it, then probe or import again"


def _as_row(time: OperatorTime) -> tuple[object, ...]:
    none = PassTime(ns=0.0, spread=0.0, repeats=0)
    timings = [
        getattr(timing or none, field)
        for timing in (time.forward, time.backward)
        for field in PassTime.__struct_fields__
    ]
    key = [getattr(time.call, name) for name in _KEY]
    outputs = msgspec.json.encode(time.outputs).decode()
    more = outputs, time.host_ns, time.source, time.when_unix
    return (*key, time.place, time.software, *timings, *more)


def _from_row(row: dict[str, object]) -> OperatorTime:
    def timing(name: str) -> dict[str, object] | None:
        fields = {field: row[f"{name}_{field}"] for field in PassTime.__struct_fields__}
        return fields if fields["repeats"] else None

    outputs = msgspec.json.decode(str(row["outputs"]), type=tuple[Output, ...])
    values = {
        "call": {name: row[name] for name in _KEY},
        "forward": timing("forward"),
        "backward": timing("backward"),
        "outputs": [msgspec.to_builtins(output) for output in outputs],
        **{name: row[name] for name in ("place", "software", "host_ns", "source", "when_unix")},
    }
    return msgspec.convert(values, OperatorTime)
