"""What is known about each run folder, in SQLite: found quickly, made again from the folders.

The folders are the truth. A damaged index, or one of another version, is removed and filled again.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from stepscope.errors import UnreadableInputError
from stepscope.ui.serve.listed_runs import BROKEN, FINISHED, RUNNING, RunSummary, ServedFolder
from stepscope.ui.words import one_line

_T = TypeVar("_T")
VERSION = 2
_BUSY_S = 10.0
# Columns of the list that it can be sorted by.
ORDERS = ("name", "state", "started_unix", "step_ms", "mfu", "peak_bytes", "device", "script")
_SUMMARY = tuple(RunSummary.__struct_fields__)
_TABLE = """
create table if not exists runs (
    id text primary key, path blob not null, name text not null, kind text not null,
    stamp text not null, summarised text, explained text,
    state text, script text, command text, started_unix real, device text, world_size integer,
    step_ms real, low_ms real, high_ms real, steps integer, peak_bytes integer, mfu real,
    verdict text, problem text
);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedRun:
    """One row. `summarised` and `explained` are the stamps that the values belong to."""

    id: str
    path: Path
    name: str
    kind: str
    stamp: str
    summarised: str | None
    explained: str | None
    state: str | None
    script: str | None
    command: str | None
    started_unix: float | None
    device: str | None
    world_size: int | None
    step_ms: float | None
    low_ms: float | None
    high_ms: float | None
    steps: int | None
    peak_bytes: int | None
    mfu: float | None
    verdict: str | None
    problem: str | None


_COLUMNS = ", ".join(field.name for field in fields(IndexedRun))


class RunIndex:
    """Safe to use from several threads; several processes may share the file."""

    def __init__(self, folder: Path, *, rebuild: bool = False) -> None:
        self._file = folder / f"index-{VERSION}.sqlite"  # each version of stepscope has its own
        self._lock = threading.RLock()
        self._closed = False
        self.generation = 0  # grows with every change that this process made
        if rebuild:
            self._remove()
        try:
            self._base = self._opened()
        except (sqlite3.Error, OSError) as error:
            raise UnreadableInputError(
                f"the index {self._file} cannot be used: {error}",
                "STEPSCOPE_CACHE_DIR names another folder for it",
            ) from None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._base.close()

    def replace_folders(self, folders: Iterable[ServedFolder], root: Path) -> None:
        """Make the list that of the last scan: new folders come, missing ones go."""
        found = [
            (
                folder.id,
                os.fsencode(folder.path),
                _name(folder.path, root),
                folder.kind,
                folder.stamp,
                folder.problem,
            )
            for folder in folders
        ]
        self._use(lambda base: self._replace(base, found))

    def _replace(self, base: sqlite3.Connection, found: list[tuple[Any, ...]]) -> None:
        known = dict(base.execute("select id, stamp from runs"))
        changed = [row for row in found if known.get(row[0]) != row[4]]
        gone = known.keys() - {row[0] for row in found}
        if not changed and not gone:
            return
        with base:
            base.executemany("delete from runs where id = ?", [(one,) for one in gone])
            base.executemany(
                "insert into runs (id, path, name, kind, stamp, problem) values (?, ?, ?, ?, ?, ?) "
                "on conflict (id) do update set path = excluded.path, name = excluded.name, "
                "kind = excluded.kind, stamp = excluded.stamp, problem = excluded.problem",
                changed,
            )
            base.execute("update runs set state = 'broken' where kind = 'none'")
        self.generation += 1

    def keep_summary(self, run_id: str, stamp: str, summary: RunSummary) -> None:
        """From the small files. A verdict and MFU from the traces stay until they come anew."""
        values = {name: getattr(summary, name) for name in _SUMMARY if name != "mfu"}
        if summary.verdict is None:
            del values["verdict"]
        self._keep(run_id, values | {"summarised": stamp})

    def keep_explanation(self, run_id: str, stamp: str, summary: RunSummary) -> None:
        """From the traces: what the small files did not say already."""
        run = self.find(run_id)
        if run is None:
            return
        values: dict[str, Any] = {"verdict": summary.verdict, "mfu": summary.mfu}
        for name in ("step_ms", "device", "peak_bytes"):
            if getattr(run, name) is None:
                values[name] = getattr(summary, name)
        self._keep(run_id, values | {"explained": stamp})

    def keep_failure(self, run_id: str, stamp: str, why: str) -> None:
        """Explaining failed: say so, and do not try again until the folder changes."""
        run = self.find(run_id)
        if run is None:
            return
        values = {"explained": stamp, "problem": run.problem or why}
        if run.state == FINISHED and run.steps is None and not run.command:
            values["state"] = BROKEN  # no command ended here: there were only traces to go by
        self._keep(run_id, values)

    def _keep(self, run_id: str, values: dict[str, Any]) -> None:
        assignments = ", ".join(f"{name} = ?" for name in values)

        def update(base: sqlite3.Connection) -> None:
            with base:
                base.execute(
                    f"update runs set {assignments} where id = ?", (*values.values(), run_id)
                )
            self.generation += 1  # here, under the lock

        self._use(update)

    def find(self, run_id: str) -> IndexedRun | None:
        rows = self._select("where id = ?", (run_id,))
        return rows[0] if rows else None

    def runs(self, *, order: str = "started_unix", descending: bool = True) -> list[IndexedRun]:
        """All of them; what is not known comes last."""
        column = order if order in ORDERS else "started_unix"
        direction = "desc" if descending else "asc"
        return self._select(f"order by {column} is null, {column} {direction}, name, id")

    def unsummarised(self) -> list[IndexedRun]:
        """Folders that have changed, and runs that may have ended without a word; newest first."""
        return self._select(
            "where kind != 'none' and (summarised is not stamp or state = ?) order by name desc",
            (RUNNING,),
        )

    def next_unexplained(self) -> IndexedRun | None:
        """The newest run that has ended and whose traces were not read since."""
        rows = self._select(
            "where kind = 'run' and summarised is stamp and explained is not stamp "
            "and state != ? order by started_unix desc limit 1",
            (RUNNING,),
        )
        return rows[0] if rows else None

    def _select(self, rest: str, values: Iterable[Any] = ()) -> list[IndexedRun]:
        given = tuple(values)
        rows = self._use(
            lambda base: base.execute(f"select {_COLUMNS} from runs {rest}", given).fetchall()
        )
        return [_row(row) for row in rows]

    def _use(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """A damaged file is made anew, and the work is done on the empty one."""
        with self._lock:
            try:
                if self._closed:
                    raise UnreadableInputError("serve is stopping")
                try:
                    return work(self._base)
                except sqlite3.DatabaseError as error:
                    if not _is_damage(error):
                        raise
                    return work(self._reopened())
            except (sqlite3.Error, OSError) as error:  # a full disk, another process that holds it
                raise UnreadableInputError(
                    f"the index {self._file} cannot be used: {error}"
                ) from None

    def _reopened(self) -> sqlite3.Connection:
        with contextlib.suppress(sqlite3.Error):
            self._base.close()
        self._remove()
        self._base = self._opened()
        self.generation += 1
        return self._base

    def _opened(self) -> sqlite3.Connection:
        try:
            return self._connected()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            self._remove()
            return self._connected()

    def _connected(self) -> sqlite3.Connection:
        base = sqlite3.connect(self._file, timeout=_BUSY_S, check_same_thread=False)
        try:
            (version,) = base.execute("pragma user_version").fetchone()
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError(f"version {version}")
            base.execute("pragma journal_mode = wal")
            base.execute("pragma synchronous = normal")
            base.execute(_TABLE)
            base.execute(f"pragma user_version = {VERSION}")
            base.execute(f"select {_COLUMNS} from runs limit 1").fetchall()
        except BaseException:
            base.close()
            raise
        return base

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self._file}{suffix}").unlink(missing_ok=True)


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Not a full disk or a lock: those pass, and the index stays."""
    if isinstance(error, sqlite3.OperationalError):
        return "no such" in str(error)
    return type(error) is sqlite3.DatabaseError


def _row(row: tuple[Any, ...]) -> IndexedRun:
    names = [field.name for field in fields(IndexedRun)]
    values = dict(zip(names, row, strict=True))
    values["path"] = Path(os.fsdecode(values["path"]))
    return IndexedRun(**values)


def _name(path: Path, root: Path) -> str:
    """Below the served folder, without characters that a screen cannot show."""
    try:
        below = path.relative_to(root)
    except ValueError:
        below = path
    return one_line(str(below)) if below != Path() else one_line(path.name)
