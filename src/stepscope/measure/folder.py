"""The run folder: names of its files, and files that are either whole or not there, also on
a full disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepscope.measure.never_raise import note
from stepscope.records.folders import STEPS_FILE, is_alive, writing
from stepscope.records.folders import TRACE as TRACE

RUN = "run.json"
RANK = "rank.json"
STEPS = STEPS_FILE
MEMORY = "memory.json"
COMMS = "comms.jsonl"
CLOCK = "clock.json"
LINKS = "links.json"
SAMPLES = "samples.json"
LINES = "lines.json"
COMPILER = "compiler.jsonl"
GRAPHS = "graphs.jsonl"
PARTS = (TRACE, STEPS, MEMORY, COMMS, CLOCK, LINKS, SAMPLES, COMPILER, GRAPHS)
SCHEMA = 1
# Further windows, packed steps and the run's collectives: trace-1.json.gz, steps-00001.json.gz, ...
_MORE_PARTS = re.compile(r"(trace|steps|comms|memory|collectives)-[^/]+\.(json|jsonl|json\.gz)")
HOME = "stepscope-runs"
_BLOCK = 4096
# The profiler adds an ending of its own while it writes.
_UNFINISHED = re.compile(r"\..+@(?P<host>[^@/]+)\.(\d{1,10})\.tmp(?:\.tmp)?")


def new_run_folder(script: str, *, home: Path | None = None) -> Path:
    """`stepscope-runs/<time>-<script>`; a number is added rather than anything overwritten."""
    base = (home or Path(HOME)) / f"{time.strftime('%Y%m%d-%H%M%S')}-{script_slug(script)}"
    return _make_first_free(base, "-")


def script_slug(script: str) -> str:
    """A script's or module's name as part of a folder's name: letters of all languages stay."""
    name = re.sub(r"\.(py|sh|ipynb)$", "", Path(script).name)
    return re.sub(r"[^\w.-]+", "-", unicodedata.normalize("NFC", name)).strip(".")[:40] or "run"


def claim_rank_folder(run: Path, rank: int) -> Path:
    """This process's own folder; a second process of the same rank gets a numbered one."""
    return _make_first_free(run / f"rank-{rank:05d}", ".")


def _make_first_free(base: Path, separator: str) -> Path:
    """Make this folder or, if it exists, the first of base-2, base-3, ... that does not."""
    for number in range(1, 1000):
        folder = base if number == 1 else base.with_name(f"{base.name}{separator}{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(str(base))


def captured_parts(rank: Path) -> list[str]:
    """The files of a rank: PARTS in their order, then further ones by name."""
    try:
        names = {path.name for path in rank.iterdir()}
    except OSError:  # it was removed
        return []
    more = sorted(name for name in names - set(PARTS) if _MORE_PARTS.fullmatch(name))
    return [*(name for name in PARTS if name in names), *more]


def temporary(path: Path) -> Path:
    """Where a file is written before it gets its name; shows which process writes it."""
    return path.with_name(f".{path.name}@{os.uname().nodename}.{os.getpid()}.tmp")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """What is written to the temporary file inside becomes `path`, whole or not at all."""
    unfinished = temporary(path)
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        remove(unfinished)


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(value))


def try_write_json(path: Path, value: Any) -> None:
    """Like `write_json`, but a disk that refuses is only noted."""
    try:
        write_json(path, value)
    except OSError as error:
        note_unwritten(path.name, error)


def note_unwritten(name: str, error: Exception) -> None:
    """Record why a file is missing from a rank's folder."""
    note(writing(name), why_refused(error))


def why_refused(error: BaseException) -> str:
    """The reason without the path: callers name the file."""
    strerror = getattr(error, "strerror", None)
    return strerror.lower() if strerror else f"{type(error).__name__}: {error}"


def check_room(folder: Path) -> None:
    """Raises OSError if no block can be written here."""
    unfinished = temporary(folder / "room")
    try:
        unfinished.write_bytes(bytes(_BLOCK))
    finally:
        remove(unfinished)


def remove(path: Path) -> None:
    """If it exists and can be removed."""
    with contextlib.suppress(OSError):
        path.unlink()


def remove_leftovers(run: Path) -> None:
    """Unfinished files of processes that ended while they wrote; those of other machines stay."""
    for place in (run, *run.glob("rank-*")):
        with contextlib.suppress(OSError):
            for file in place.iterdir():
                match = _UNFINISHED.fullmatch(file.name)
                if match and match["host"] == os.uname().nodename and not is_alive(int(match[2])):
                    remove(file)


# A JSON file that can still be written when the disk is full or no more files can be opened.
#
# It takes a whole block of the disk when it is first written, and stays open. When a later version
# cannot be written as a new file, the longest version that fits overwrites it in place.


class KeptJson:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._identity: tuple[int, int] | None = None

    def write(self, *versions: Any, last: bool = False) -> None:
        """Write the first version; if that fails, overwrite the file with the first that fits.

        Raises OSError if neither is possible, and FileExistsError if another process owns the file.
        """
        data = _padded(versions[0], 0 if last else _BLOCK)
        if self._identity is None:
            self._make(self.path, data)
        else:
            try:
                self._make(temporary(self.path), data)
            except OSError:
                if not self._write_over(versions):
                    raise
        if last:
            self._let_go()

    def _make(self, path: Path, data: bytes) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write_all(file, data)
            if path != self.path:
                path.replace(self.path)
        except BaseException:
            os.close(file)
            remove(path)
            raise
        self._let_go()
        self._file, self._identity = file, _identity(file)

    def _write_over(self, versions: tuple[Any, ...]) -> bool:
        if not self._is_ours() or self._file is None:
            return False
        size = os.fstat(self._file).st_size
        for version in versions:
            data = _padded(version, size)
            if len(data) == size:
                return os.pwrite(self._file, data, 0) == size
        return False

    def _let_go(self) -> None:
        if self._is_ours() and self._file is not None:
            os.close(self._file)
        self._file = None

    def _is_ours(self) -> bool:
        """A script may close every file it finds, and get the same number for one of its own."""
        try:
            return self._file is not None and _identity(self._file) == self._identity
        except OSError:
            return False


def _padded(value: Any, size: int) -> bytes:
    """Spaces after a JSON value mean nothing."""
    return json.dumps(value).encode().ljust(size - 1 if size else 0) + (b"\n" if size else b"")


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino
