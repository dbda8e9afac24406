"""Find the run folders below one folder, name them by ids that hold no path, and summarise
each in a row of the list.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import os
import re
import shlex
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from stepscope.errors import StepscopeError, UnreadableInputError
from stepscope.records.quality import Ranks
from stepscope.text.words import plural
from stepscope.trace.decode import Oddities, read_record
from stepscope.trace.files import is_folder, may_exist, read_start
from stepscope.trace.run_folder.related_runs import BASELINE, JOURNAL, TRIALS, TUNE, read_tune
from stepscope.trace.run_folder.run_state import RUN, find_failure, run_notes
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from stepscope.verify.runs import ComparedRun

# Anybody may write into such a folder. Links that lead out of it are listed and never followed;
# names may hold any bytes but "/" and zero; a folder may go away at any moment.

Kind = Literal["run", "tune", "none"]

_DEEPEST = 4  # levels below the folder that may hold runs
_MOST_FOLDERS = 50_000  # looked into in one scan
_STAMPED_RANKS = 4  # whose files show whether a run has changed
_ID_BYTES = 8
_RANK = "rank-"
_RUN_NAME = re.compile(r"\d{8}-\d{6}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFolder:
    """One folder that is listed. `stamp` changes with the files that tell about it."""

    id: str
    path: Path
    kind: Kind
    stamp: str
    problem: str | None = None  # why it cannot be read as a run


class RunsDirectory:
    """What the last scan found. Safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._known: dict[str, Path] = {}
        self._is_scanned = False
        self._lock = threading.Lock()

    def scan(self) -> list[ServedFolder]:
        """All folders as they are now; a folder that is reached twice is listed once."""
        if not is_folder(self.root):
            raise UnreadableInputError(f"{self.root} is not a folder any more")
        by_id = {folder.id: folder for folder in self._search()}
        with self._lock:
            self._known = {folder.id: folder.path for folder in by_id.values()}
            self._is_scanned = True
        return list(by_id.values())

    def remember(self, folders: Iterable[tuple[str, Path]]) -> None:
        """Know folders of an earlier scan until the next one."""
        with self._lock:
            self._known |= dict(folders)

    def folder_of(self, run_id: str) -> Path | None:
        """Return None for an unknown id, and for a folder that has gone or now leads out of the
        tree.
        """
        try:
            path = self._known_path(run_id)
            if path is None:
                return None
            inside = path.resolve(strict=True).is_relative_to(self.root)
            return path if inside and is_folder(path) else None
        except (OSError, RuntimeError, UnreadableInputError):
            return None

    def _known_path(self, run_id: str) -> Path | None:
        """Before the first scan nothing may be said to be missing: a page that was open while the
        server was started again asks at once."""
        with self._lock:
            path, is_scanned = self._known.get(run_id), self._is_scanned
        if path is None and not is_scanned:
            self.scan()
            return self._known.get(run_id)
        return path

    def _search(self) -> Iterator[ServedFolder]:
        left = _MOST_FOLDERS
        waiting = [(self.root, 0, _entries(self.root))]
        while waiting and left:
            left -= 1
            path, depth, names = waiting.pop()
            kind = _kind(names)
            if kind != "none":
                yield ServedFolder(id=run_id(path), path=path, kind=kind, stamp=_stamp(path, names))
            if kind == "run":
                continue
            # A tune that goes on, or was killed: its trials are runs that it may remove again.
            tunes = kind == "tune" or (JOURNAL in names and TRIALS in names)
            inner = list(self._inner(path, names, only=BASELINE if tunes else None))
            if depth < _DEEPEST:
                waiting += [
                    (folder.path, depth + 1, _entries(folder.path))
                    for folder in inner
                    if folder.problem is None
                ]
            yield from (folder for folder in inner if folder.problem is not None)
            # An empty folder, or one that is called like a run: others are none of ours.
            may_become_run = not names or _RUN_NAME.match(path.name) is not None
            if kind == "none" and depth == 1 and not inner and may_become_run:
                yield _broken(path, "holds neither run.json nor ranks, or not yet")

    def _inner(
        self, path: Path, names: dict[str, os.DirEntry[str]] | str, only: str | None
    ) -> Iterator[ServedFolder]:
        """Folders that may be runs or hold some; those with a problem are not opened."""
        if isinstance(names, str):
            yield _broken(path, names)
            return
        for name in sorted(names, reverse=True):
            entry = names[name]
            if name.startswith(".") or (only is not None and name != only):
                continue
            inner = path / name
            if entry.is_symlink():
                if _leads_out(inner, self.root):
                    yield _broken(inner, "is a link that leads out of the served folder")
                continue  # what it leads to is found where it is
            if _is_dir(entry):
                yield ServedFolder(id=run_id(inner), path=inner, kind="none", stamp="")


def run_id(path: Path) -> str:
    """Short and stable: of the resolved path."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError):
        real = path.absolute()
    return hashlib.blake2b(os.fsencode(real), digest_size=_ID_BYTES).hexdigest()


def _entries(folder: Path) -> dict[str, os.DirEntry[str]] | str:
    """List what is in a folder by name, or say why that cannot be seen."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry for entry in entries}
    except PermissionError:
        return "may not be read: no permission"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _kind(names: dict[str, os.DirEntry[str]] | str) -> Kind:
    if isinstance(names, str):
        return "none"
    if TUNE in names:
        return "tune"
    is_run = RUN in names or any(name.startswith(_RANK) for name in names)
    return "run" if is_run else "none"


def _broken(path: Path, problem: str) -> ServedFolder:
    return ServedFolder(
        id=hashlib.blake2b(os.fsencode(path), digest_size=_ID_BYTES).hexdigest(),
        path=path,
        kind="none",
        stamp=problem,
        problem=problem,
    )


def _stamp(path: Path, names: dict[str, os.DirEntry[str]] | str) -> str:
    """Times and sizes of run.json, tune.json and the files of the first ranks."""
    entries = names if isinstance(names, dict) else {}
    ranks = sorted(name for name in entries if name.startswith(_RANK))
    digest = hashlib.blake2b(digest_size=_ID_BYTES)
    digest.update(f"{len(ranks)}".encode())
    for name in (RUN, TUNE):
        if name in entries:
            digest.update(_entry_state(entries[name]))
    for name in ranks[:_STAMPED_RANKS]:
        files = _entries(path / name)
        for _, file in sorted(files.items()) if isinstance(files, dict) else ():
            digest.update(_entry_state(file))
    return digest.hexdigest()


def _entry_state(entry: os.DirEntry[str]) -> bytes:
    try:
        state = entry.stat()
    except OSError:
        return b"gone"
    return os.fsencode(f"{entry.name}\0{state.st_mtime_ns}\0{state.st_size}\0")


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode)
    except OSError:
        return False


def _leads_out(link: Path, root: Path) -> bool:
    """Only folders count: other links are no runs."""
    try:
        real = link.resolve(strict=True)
        return real.is_dir() and not real.is_relative_to(root)
    except (OSError, RuntimeError):
        return False


# One run folder in a row of the list, from its small files.
#
# This is the worker's work: a folder may hold a million steps or a thousand ranks.

_MOST_BYTES = 64 << 20  # of run.json, which lists every rank
_TITLE_BYTES = 8192
_TITLE = re.compile(r"<title>(.*?) · stepscope</title>", re.DOTALL)
_MOST_TEXT = 2000
_YEAR_5000 = 9.6e10
REPORT = "report.html"
RUNNING, FINISHED, FAILED, OPEN, BROKEN = "running", "finished", "failed", "not closed", "broken"


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the list says about a folder. None is not known."""

    state: str | None
    script: str | None = None  # its path, as far as it is known
    command: str | None = ""
    started_unix: float | None = None
    device: str | None = None
    world_size: int | None = None
    step_ms: float | None = None  # the mean of the steady steps, as `compare` takes it
    low_ms: float | None = None
    high_ms: float | None = None
    steps: int | None = None
    peak_bytes: int | None = None
    mfu: float | None = None
    verdict: str | None = None
    problem: str | None = None


class _RunJson(msgspec.Struct, frozen=True, kw_only=True):
    command: list[str] | None = None
    folder: str | None = None
    started_unix: Annotated[float, msgspec.Meta(ge=0, lt=_YEAR_5000)] | None = None
    exit_code: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 32)] | None = None
    world_size: Ranks | None = None


def summarise(folder: Path, kind: str) -> RunSummary:
    """Summarise a folder from small files alone, also what is wrong with it."""
    try:
        return _summarise_tune(folder) if kind == "tune" else _summarise_run(folder)
    except StepscopeError as error:
        return RunSummary(state=BROKEN, problem=short_text(str(error)))


def _summarise_tune(folder: Path) -> RunSummary:
    from stepscope.ui.tried_remedies import tune_answer

    result = read_tune(folder)
    return RunSummary(
        state=FINISHED,
        script=script_path(result.command, result.folder or None),
        command=short_text(shlex.join(result.command)),
        started_unix=_written(folder),
        step_ms=result.baseline_ms,
        low_ms=result.baseline_low_ms,
        high_ms=result.baseline_high_ms,
        verdict=short_text(tune_answer(result, folder).verdict),
    )


def _summarise_run(folder: Path) -> RunSummary:
    oddities = Oddities(RUN)
    run = read_record(folder / RUN, _RunJson, oddities, _MOST_BYTES)
    is_damaged = run is None and may_exist(folder / RUN)
    run = run or _RunJson()
    state, problem = _run_state(folder, run)
    if is_damaged:
        state, problem = BROKEN, f"{RUN} cannot be read: damaged, or only half written"
    measured, why = _measured(folder)
    if state == FINISHED and run.exit_code is None and measured is None:
        state, problem = BROKEN, f"holds no step and does not say how it ended: {why}"
    facts = measured.facts if measured else {}
    low, mean, high = _mean_step(measured)
    return RunSummary(
        state=state,
        script=script_path(run.command or facts.get("argv") or (), run.folder),
        command=short_text(shlex.join(run.command or ())),
        started_unix=run.started_unix or _written(folder),
        device=device_words(facts["device"]) if "device" in facts else None,
        world_size=run.world_size or facts.get("world_size"),
        step_ms=mean,
        low_ms=low,
        high_ms=high,
        steps=len(measured.step_ms) if measured and len(measured.step_ms) else None,
        peak_bytes=measured.peak_bytes if measured else None,
        verdict=_kept_verdict(folder),
        problem=problem or why,
    )


def _run_state(folder: Path, run: _RunJson) -> tuple[str, str | None]:
    notes = {note.id: note.detail for note in run_notes(folder)}
    if "still-running" in notes:
        return RUNNING, None
    if run.exit_code:
        failed = find_failure(folder, run.exit_code)
        return FAILED, short_text(f"the command failed: {failed.words}") if failed else None
    if "not-closed" in notes:
        return OPEN, short_text(notes["not-closed"])
    return FINISHED, None


def _measured(folder: Path) -> tuple[ComparedRun | None, str | None]:
    """Return the steps as `compare` reads them, or why there are none."""
    from stepscope.verify.runs import find_runs

    try:
        return find_runs(str(folder))[0], None
    except StepscopeError as error:
        return None, short_text(str(error))


def _mean_step(run: ComparedRun | None) -> tuple[float | None, float | None, float | None]:
    """Low, mean and high of the steady steps; None where no step was measured."""
    if run is None or run.columns is None:
        return None, None, None
    from stepscope.explain.whole_run.stalls import find_steady
    from stepscope.verify.change import mean_spread
    from stepscope.verify.spread import student_quantile

    steady, _ = find_steady(run.columns)
    values = run.columns.step_ns[steady] / 1e6
    if len(values) < 2:
        return None, float(values.mean()) if len(values) else None, None
    spread = mean_spread(values)
    reach = student_quantile(spread.freedom, 0.975) * spread.deviation
    return max(0.0, spread.value - reach), spread.value, spread.value + reach


def device_words(device: object) -> str:
    """rank.json has null for a training on the CPU."""
    if isinstance(device, dict):
        device = device.get("name")
    return one_line(device)[:80] if isinstance(device, str) and device else "CPU"


def _kept_verdict(folder: Path) -> str | None:
    """Return the title of the report that `stepscope run` left: text only, the page is never
    served.
    """
    try:
        start = read_start(folder / REPORT, _TITLE_BYTES).decode("utf-8", "replace")
    except UnreadableInputError:
        return None
    title = _TITLE.search(start)
    return short_text(html.unescape(title[1])) if title else None


def script_path(command: Sequence[str], folder: str | None) -> str | None:
    """Return the script of a command as one path, so that runs from different folders are told
    apart.
    """
    script = next((word for word in command if word.endswith(".py")), None)
    if script is None and "-m" in command[:-1]:
        script = command[command.index("-m") + 1]
    if script is None:
        return None
    return short_text(str(Path(folder) / script) if folder and script.endswith(".py") else script)


def _written(folder: Path) -> float | None:
    try:
        return folder.stat().st_mtime
    except (OSError, ValueError):
        return None


def short_text(text: str) -> str:
    line = one_line(text)
    if len(line) <= _MOST_TEXT:
        return line
    left = len(line) - _MOST_TEXT
    return f"{line[:_MOST_TEXT]}… ({left} more {plural(left, 'character')})"


# Paths between `serve` and its worker: names may hold any bytes, so they travel as digits.


def path_of(text: str) -> Path:
    return Path(os.fsdecode(bytes.fromhex(text)))


def text_of(path: Path) -> str:
    return os.fsencode(path).hex()


# What is known about each run folder, in SQLite: the folders are the truth, and a damaged index, or
# one of another version, is removed and filled again.

_T = TypeVar("_T")
VERSION = 3
_BUSY_S = 10.0
# Columns of the list that it can be sorted by.
ORDERS = ("name", "state", "started_unix", "step_ms", "mfu", "peak_bytes", "device", "script")
_SUMMARY = tuple(RunSummary.__struct_fields__)


class IndexedRun(RunSummary, frozen=True, kw_only=True):
    """One row. `summarised` and `explained` are the stamps that the values belong to."""

    id: str
    path: Path
    name: str
    kind: str
    stamp: str
    summarised: str | None
    explained: str | None


_NAMES = IndexedRun.__struct_fields__
_COLUMNS = ", ".join(_NAMES)
_TABLE = f"create table if not exists runs ({_COLUMNS}, primary key (id))"


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
        """Keep what small files say. A verdict and MFU from the traces stay until they come
        anew.
        """
        values = {name: getattr(summary, name) for name in _SUMMARY if name != "mfu"}
        if summary.verdict is None:
            del values["verdict"]
        self._keep(run_id, values | {"summarised": stamp})

    def keep_explanation(self, run_id: str, stamp: str, summary: RunSummary) -> None:
        """Keep what traces say, where the small files did not say it already."""
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
        """Return the newest run that has ended and whose traces were not read since."""
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
    """Tell damage from a full disk or a lock: those pass, and the index stays."""
    if isinstance(error, sqlite3.OperationalError):
        return "no such" in str(error)
    return type(error) is sqlite3.DatabaseError


def _row(row: tuple[Any, ...]) -> IndexedRun:
    values = dict(zip(_NAMES, row, strict=True))
    values["path"] = Path(os.fsdecode(values["path"]))
    return IndexedRun(**values)


def _name(path: Path, root: Path) -> str:
    """Below the served folder, without characters that a screen cannot show."""
    try:
        below = path.relative_to(root)
    except ValueError:
        below = path
    return one_line(str(below)) if below != Path() else one_line(path.name)
