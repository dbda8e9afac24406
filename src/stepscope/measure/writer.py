"""Write lines to disk in the background: the training thread only appends to a queue, and
older lines of steps.jsonl are packed.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import threading
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import add, sub
from pathlib import Path
from time import monotonic, thread_time_ns, time
from typing import IO, Any, Protocol

from stepscope.measure import folder as layout
from stepscope.measure.folder import note_unwritten
from stepscope.measure.never_raise import note
from stepscope.records.folders import (
    ABSENT,
    END,
    MARKS,
    OTHER,
    PACKED_SCHEMA,
    PHASE_FIELDS,
    ROUNDED,
    ROUNDING,
    STEP,
    WALL,
    WALLS,
    part_name,
)

Line = dict[str, Any]

# Every line reaches the operating system whole within the flush interval (FLUSH_S up to 64 ranks),
# so a kill loses no more than that.

FLUSH_S = 0.5
_RANKS_AT_ONCE, _LONGEST_S = 64, 10.0
PIECE_PAUSE_S = 0.002  # between two pieces of packing, for the training
MOST_UNWRITTEN = 1 << 16  # lines


def flush_interval_s(world_size: int) -> float:
    """Every flush opens the file. So that a file system which all ranks share has to open no more
    than some hundred files a second, ranks of a large job write less often."""
    return min(_LONGEST_S, FLUSH_S * max(1.0, world_size / _RANKS_AT_ONCE))


class AsLines(Protocol):
    """Runs in the writer's thread; may hold rows back until a later call, but not the last one."""

    def __call__(self, rows: list[Any], *, last: bool) -> list[str]: ...


def append_lines(path: Path, lines: Iterable[str], *, alone: bool = False) -> None:
    """In one unbuffered write, so that no part of a line stays in this process.

    With `alone` (no other process writes to the file) either all lines are written or none.
    """
    data = "".join(f"{line}\n" for line in lines).encode()
    with path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        if file.write(data) != len(data):
            if alone:
                file.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def try_append(path: Path, values: Iterable[Any], *, name: str | None = None) -> None:
    """Append a line of JSON for each value; a disk that refuses is only noted."""
    try:
        append_lines(path, map(json.dumps, values))
    except OSError as error:
        note_unwritten(name or path.name, error)


def packed_text(value: Any) -> str:
    """Return JSON, compressed, as text."""
    text = json.dumps(value, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode("utf-8", "replace"), 6)).decode()


def started_thread(work: Callable[[], object], name: str) -> threading.Thread | None:
    """None, with a note, when the system allows no more threads."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        note(name, str(error))
        return None
    return thread


class LineWriter:
    """Empties a queue into one file from a daemon thread."""

    def __init__(
        self,
        path: Path,
        queue: deque[Any],
        as_lines: AsLines,
        packing: StepPacking | None = None,
        *,
        flush_s: float = FLUSH_S,
        spent: Callable[[int, int], object] = lambda _lines, _ns: None,
    ) -> None:
        """`spent` is told how many lines were written and what processor time that took."""
        self._path = path
        self._spent, self._written = spent, 0
        self._flush_s = flush_s
        self._packing = packing
        self._queue = queue
        self._as_lines = as_lines
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._unwritten: list[str] = []  # a full disk may have room again
        self.beside: Callable[[], None] | None = None  # done once per flush; never raises
        # Without a thread, lines are written at the end.
        self._thread = started_thread(self._run, "stepscope-writer")

    def close(self) -> None:
        """Write what is left, within a few seconds."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        self._drain(last=True)
        with self._lock:
            if self._packing is not None:
                self._packing.close()

    def _run(self) -> None:
        # At round times of the wall clock, so that all ranks of a job lose this time together.
        while not self._stop.wait(self._flush_s - time() % self._flush_s):
            began, self._written = thread_time_ns(), 0
            self._drain()
            self._pack()
            if self.beside is not None:
                self.beside()
            self._spent(self._written, thread_time_ns() - began)

    def _pack(self) -> None:
        """Until it is done, or lines wait to be written: that comes first."""
        packing = self._packing
        until = monotonic() + FLUSH_S
        while packing is not None and packing.is_busy and monotonic() < until:
            with self._lock:
                packing.go_on()
            if self._stop.wait(PIECE_PAUSE_S):
                break

    def _drain(self, *, last: bool = False) -> None:
        with self._lock:
            rows = [self._queue.popleft() for _ in range(len(self._queue))]
            try:
                self._unwritten += self._as_lines(rows, last=last)
            except Exception as error:
                note("writer", error)
            if self._unwritten:
                self._write(last=last)

    def _write(self, *, last: bool) -> None:
        try:
            append_lines(self._path, self._unwritten, alone=True)
            self._written += len(self._unwritten)
            if self._packing is not None:
                self._packing.wrote(len(self._unwritten))
        except OSError as error:
            if not last and len(self._unwritten) <= MOST_UNWRITTEN:
                return
            note_unwritten(self._path.name, error)
        del self._unwritten[:]


# Long runs: older lines of steps.jsonl move, a block at a time, into packed parts next to it.
#
# Packing runs in the writer's thread while the model trains, in small pieces: no piece holds
# Python's lock for long, and lines are written between them. A part gets its name only when it is
# on disk, and only then are its lines cut from steps.jsonl. A kill in between leaves steps in both
# files, and readers count them once.

BLOCK = 20_000  # lines of a packed part
KEPT = 2_000  # lines that always stay in steps.jsonl, for those who watch a running job
_PIECE_LINES = 32  # about 0.2 ms
_PIECE_NUMBERS = 1000
_GZIP = 31  # zlib's name for a gzip file


class PartColumns:
    """The columns of one packed part, as they are stored. Fields that it does not know are kept."""

    def __init__(self) -> None:
        self.steps = 0
        self.lines = 0
        self._stretches: list[Line] = []
        self._columns: dict[str, array[int]] = {}
        self._marks: dict[str, list[int]] = {name: [] for name in MARKS}
        self._step = self._end = 0  # of the last line
        self._unit = 0  # of rounded fields

    def add(self, lines: list[Line]) -> None:
        self.lines += len(lines)
        self._stretches += [line for line in lines if WALLS in line]
        lines = [line for line in lines if WALLS not in line]
        if not lines:
            return
        names = set().union(*lines)
        for name in names.intersection(MARKS):
            places = enumerate(lines, self.steps)
            self._marks[name] += [place for place, line in places if line.get(name)]
        columns = {
            name: [line.get(name, ABSENT) for line in lines]
            for name in (names | self._columns.keys()).difference(MARKS)
        }
        self._leave_out_known(columns, lines)
        self._round(columns)
        for name, values in columns.items():
            if name not in self._columns:
                self._columns[name] = array("q", [ABSENT]) * self.steps
            self._columns[name].extend(values)
        self.steps += len(lines)

    def _leave_out_known(self, columns: dict[str, list[int]], lines: list[Line]) -> None:
        """Keep of some fields only what the others do not say (see records/folders.py)."""
        walls = [line[WALL] for line in lines]
        phases = [name for name in PHASE_FIELDS if name in columns]
        spent = [sum([line.get(name, 0) for name in phases]) for line in lines]
        others = [line.get(OTHER, 0) for line in lines]
        ends = [line.get(END, 0) for line in lines]
        columns[OTHER] = list(map(sub, map(add, others, spent), walls))
        columns[END] = list(map(sub, _distances(self._end, ends), walls))
        columns[STEP] = _distances(self._step, columns[STEP])
        self._step, self._end = lines[-1][STEP], ends[-1]

    def _round(self, columns: dict[str, list[int]]) -> None:
        """After that, `other_ns` is what the rounded phases leave: phases still add up."""
        unit = self._unit = self._unit or power_of_ten(min(columns[WALL]) // ROUNDING)
        for name in ROUNDED.intersection(columns):
            columns[name] = [value // unit for value in columns[name]]  # ABSENT stays negative

    def encode(self) -> Iterator[bytes]:
        """Pieces of the part's text."""
        # Small numbers take little space once compressed, so all count from the smallest one.
        base = {name: min(column) for name, column in self._columns.items()}
        yield f'{{"schema": {PACKED_SCHEMA}, "steps": {self.steps}, "columns": {{'.encode()
        for place, (name, column) in enumerate(self._columns.items()):
            yield f'{", " if place else ""}"{name}": ['.encode()
            yield from _numbers(column, base[name])
            yield b"]"
        units = dict.fromkeys(ROUNDED.intersection(self._columns), self._unit)
        about = {"base": base, "unit": units, "marks": self._marks, "stretches": self._stretches}
        yield f"}}, {json.dumps(about)[1:]}".encode()


def power_of_ten(limit: int) -> int:
    """The largest one up to this limit, at least 1."""
    power = 1
    while 10 * power <= limit:
        power *= 10
    return power


def _distances(before: int, values: list[int]) -> list[int]:
    return list(map(sub, values, [before, *values[:-1]]))


def _numbers(column: array[int], base: int) -> Iterator[bytes]:
    for start in range(0, len(column), _PIECE_NUMBERS):
        piece = ",".join([str(value - base) for value in column[start : start + _PIECE_NUMBERS]])
        yield f"{',' if start else ''}{piece}".encode()


class StepPacking:
    """Moves blocks out of one rank's steps.jsonl. All calls come from the writer's thread."""

    def __init__(self, tail: Path) -> None:
        self._tail = tail
        self._lines = 0  # in steps.jsonl
        self._parts = 0
        self._work: Iterator[None] | None = None
        self._wanted = BLOCK + KEPT

    def wrote(self, lines: int) -> None:
        """So many lines were added to steps.jsonl."""
        self._lines += lines
        if self._work is None and self._lines >= self._wanted:
            self._work = self._pack()

    @property
    def is_busy(self) -> bool:
        return self._work is not None

    def go_on(self) -> None:
        """Do the next piece of work."""
        if self._work is None:
            return
        try:
            if next(self._work, self) is self:
                self._work = None
        except OSError:  # all lines are in steps.jsonl: try again later
            self._work = None
            self._wanted = self._lines + KEPT
        except Exception as error:
            self._work = None
            self._wanted = 1 << 62
            note("packing steps", error)

    def close(self) -> None:
        """Give up what is half done: all its lines are in steps.jsonl."""
        work, self._work = self._work, None
        if work is not None:
            work.close()  # type: ignore[attr-defined]

    def _pack(self) -> Iterator[None]:
        part = self._tail.with_name(part_name(self._parts + 1))
        with self._tail.open("rb") as tail:
            columns = PartColumns()
            yield from _read_block(tail, columns)
            with layout.replacing(part) as unfinished:
                yield from _write_gzip(unfinished, columns.encode())
            # Replace steps.jsonl by what follows the block; if that fails, the part goes again.
            try:
                with layout.replacing(self._tail) as rest:
                    rest.write_bytes(tail.read())
            except BaseException:
                layout.remove(part)
                raise
            self._parts += 1
        self._lines -= columns.lines
        self._wanted = BLOCK + KEPT


def _read_block(tail: IO[bytes], columns: PartColumns) -> Iterator[None]:
    """The first BLOCK lines; the file is then read up to their end."""
    while columns.lines < BLOCK:
        lines = list(islice(iter(tail.readline, b""), min(_PIECE_LINES, BLOCK - columns.lines)))
        if not lines:
            raise ValueError("steps.jsonl is shorter than what was written to it")
        columns.add(json.loads(b"[%s]" % b",".join(lines)))
        yield


def _write_gzip(file: Path, pieces: Iterable[bytes]) -> Iterator[None]:
    pack = zlib.compressobj(wbits=_GZIP)
    with file.open("wb") as out:
        for piece in pieces:
            out.write(pack.compress(piece))
            yield
        out.write(pack.flush())
        out.flush()
        os.fsync(out.fileno())  # once in BLOCK steps
