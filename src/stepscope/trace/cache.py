"""Keep traces on disk, found again by the content of the file each was read from.

An entry is checked against the rules that every Trace keeps: its file may hold anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.folders import user_folder
from stepscope.records.quality import MAX_EVENT_BYTES, MAX_RANKS, Note
from stepscope.records.trace import (
    ABSENT,
    CollectiveArgs,
    Device,
    DeviceEvents,
    DeviceKind,
    HostEvents,
    HostKind,
    MemoryEvents,
    Thread,
    Trace,
)
from stepscope.trace.files import reading
from stepscope.trace.formats.plausible_values import (
    LIMIT_DUR_NS,
    LIMIT_NS,
    MAX_ELEMENTS,
    OddValues,
    column_types,
    is_rank_text,
    limit_numbers,
    limit_sizes,
    limit_texts,
    plausible_groups,
)
from stepscope.trace.links import are_sorted

Column = NDArray[Any]

# The key is a digest of the trace file's bytes, so an entry is never stale, however the file was
# moved, copied or rewritten. Entries are written under another name and then renamed: two processes
# may write the same one. Anything wrong with an entry means "not cached", never an error.
#
# The folder may hold files of other programs, and other users may write to it. Only files with our
# names are touched; only regular files that belong to this user or root, and that nobody else may
# write to, are read.

try:
    import fcntl
except ImportError:  # not a Unix: leftovers are recognised by their age alone
    fcntl = None  # type: ignore[assignment]


# Raise it whenever readers or links change the content of a Trace.
VERSION = 6
LIMIT_BYTES = 4 << 30
_ABANDONED_S = 24 * 3600
_ENTRY = re.compile(r"stepscope-[0-9a-f]{40}\.columns")
_FORMER_ENTRY = re.compile(r"[0-9a-f]{40}\.columns")  # up to version 4; ours if it has MAGIC
_TEMPORARY = re.compile(r"stepscope-[0-9a-f]{16}\.writing")
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_NOT_READ = (OSError, ValueError, RecursionError, MemoryError, msgspec.MsgspecError)
_NOT_WRITTEN = (OSError, ValueError, OverflowError, RecursionError)


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """A folder of entries."""

    folder: Path

    @classmethod
    def default(cls) -> Cache:
        """$STEPSCOPE_CACHE_DIR, else the user's cache folder."""
        return cls(folder=user_folder("STEPSCOPE_CACHE_DIR", "", "XDG_CACHE_HOME", "~/.cache"))

    def key(self, path: Path) -> str:
        """The name of the file's cache entry, without its suffix."""
        digest = hashlib.sha256(f"{VERSION}:".encode())
        with reading(path) as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return f"stepscope-{digest.hexdigest()[:40]}"

    def load(self, key: str, path: Path) -> Trace | None:
        """The entry as a Trace whose columns are mapped from disk, or None."""
        entry = self._entry(key)
        try:
            with _open_own(entry) as file:
                trace = read_entry(file, key, str(path))
        except _NOT_READ:
            return None
        with contextlib.suppress(OSError):  # a cache that root filled may be read-only
            os.utime(entry)  # the least recently used entry is removed first
        return trace

    def save(self, key: str, trace: Trace) -> None:
        """Write the entry; on a full or read-only disk nothing is cached."""
        with contextlib.suppress(*_NOT_WRITTEN):  # also for facts that JSON cannot hold
            # The size of the entry without its head.
            if _end(_layout({name: len(getattr(trace, name)) for name in _TABLES})) > LIMIT_BYTES:
                return
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sweep()
            with _temporary(self.folder) as (file, path):
                write_entry(file, key, trace)
                file.flush()
                if file.tell() <= LIMIT_BYTES:
                    path.replace(self._entry(key))
            self._make_room()

    def used_bytes(self) -> int:
        return sum(info.st_size for info, _ in self._entries())

    def _entry(self, key: str) -> Path:
        return self.folder / f"{key}.columns"

    def _entries(self) -> Iterator[tuple[os.stat_result, Path]]:
        yield from _files(self.folder, _ENTRY)
        for info, path in _files(self.folder, _FORMER_ENTRY):
            if _begins_as_ours(path):
                yield info, path

    def _make_room(self) -> None:
        """Remove entries over the limit first, then the least recently used."""

        def priority(entry: tuple[os.stat_result, Path]) -> tuple[bool, float]:
            return entry[0].st_size <= LIMIT_BYTES, entry[0].st_mtime

        entries = sorted(self._entries(), key=priority)
        used = sum(info.st_size for info, _ in entries)
        for info, path in entries:
            if used <= LIMIT_BYTES:
                return
            path.unlink(missing_ok=True)
            used -= info.st_size

    def _sweep(self) -> None:
        """Remove the unfinished files of killed writers."""
        for info, path in _files(self.folder, _TEMPORARY):
            with contextlib.suppress(OSError), _open_own(path) as file:
                if _is_abandoned(file, info.st_mtime):
                    path.unlink(missing_ok=True)


def _files(folder: Path, name: re.Pattern[str]) -> Iterator[tuple[os.stat_result, Path]]:
    """The regular files with matching names; files may come and go meanwhile."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if name.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    info = path.lstat()
                    if stat.S_ISREG(info.st_mode):
                        yield info, path


def _open_own(path: Path) -> IO[bytes]:
    """Open a regular file that belongs to this user or root and that nobody else may write to."""
    file = os.fdopen(os.open(path, _READ), "rb")
    info = os.fstat(file.fileno())
    own = not hasattr(os, "geteuid") or info.st_uid in (0, os.geteuid())
    if not stat.S_ISREG(info.st_mode) or not own or info.st_mode & 0o022:
        file.close()
        raise PermissionError(f"{path} may have been written by another user")
    return file


def _begins_as_ours(path: Path) -> bool:
    try:
        with _open_own(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """A new file, locked while its writer lives, and removed afterwards unless renamed."""
    path, file = _create_locked(folder)
    try:
        with file:
            yield file, path
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _create_locked(folder: Path) -> tuple[Path, IO[bytes]]:
    """Try again under another name if another process removes the file before it is locked."""
    while True:
        path = folder / f"stepscope-{os.urandom(8).hex()}.writing"
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        _lock(file)
        if os.fstat(file.fileno()).st_nlink:
            return path, file
        file.close()


def _lock(file: IO[bytes]) -> None:
    if fcntl is not None:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)


def _is_abandoned(file: IO[bytes], written: float) -> bool:
    """Whether nobody holds its lock or, without locks, nobody wrote to it for a day."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
    return written < time.time() - _ABANDONED_S


# One file of the cache: a Trace as a head of JSON, then its columns as they are in memory.
#
# An entry is refused if its list of columns differs in any name, type, offset or length from what
# this version writes, or if its values break a rule of find_inconsistency, whatever its checksums.

MAGIC = b"stepscope-columns\n"
_ALIGN = 64
_SIZES = 16  # bytes: length and checksum of the head
_START = len(MAGIC) + _SIZES
_MAX_HEAD_BYTES = 256 << 20
_TABLES: dict[str, type[Any]] = {"host": HostEvents, "device": DeviceEvents, "memory": MemoryEvents}


class _Column(msgspec.Struct, frozen=True, array_like=True):
    table: str
    column: str
    dtype: str
    offset: int
    count: int


class _Head(msgspec.Struct, frozen=True):
    key: str
    format: str
    kind: str
    rank: int | None
    world_size: int | None
    backend: str | None
    groups: tuple[dict[str, Any], ...]
    devices: tuple[Device, ...]
    facts: dict[str, str | bool | int | float]
    events: int
    strings: tuple[str, ...]
    threads: tuple[Thread, ...]
    collectives: tuple[CollectiveArgs, ...]
    quality: tuple[Note, ...]
    columns: list[_Column]
    checksum: int  # of all columns, one after the other


_TRACE_FIELDS = [name for name in _Head.__struct_fields__ if name in Trace.__struct_fields__]


def write_entry(file: IO[bytes], key: str, trace: Trace) -> None:
    """Raises ValueError for a trace that an entry cannot hold."""
    layout = _layout({name: len(getattr(trace, name)) for name in _TABLES})
    checksum = 0
    for column in layout:
        checksum = zlib.crc32(_column_values(trace, column).data, checksum)
    fields = {name: getattr(trace, name) for name in _TRACE_FIELDS}
    head = msgspec.json.encode(_Head(key=key, columns=layout, checksum=checksum, **fields))
    if len(head) > _MAX_HEAD_BYTES:
        raise ValueError("the head is too long")
    sizes = len(head).to_bytes(8, "little") + zlib.crc32(head).to_bytes(8, "little")
    begin = MAGIC + sizes + head
    file.write(begin + b"\0" * (-len(begin) % _ALIGN))
    for column in layout:
        values = _column_values(trace, column)
        file.write(values.data)
        file.write(b"\0" * (-values.nbytes % _ALIGN))


def read_entry(file: IO[bytes], key: str, path: str) -> Trace:
    """The Trace, with columns mapped from disk. Raises ValueError if this is not its entry."""
    data = np.memmap(file, dtype=np.uint8, mode="r")
    head, base = _head(data)
    if head.key != key:
        raise ValueError("the entry of another trace")
    counts = {column.table: column.count for column in head.columns}
    layout = _layout({name: counts.get(name, -1) for name in _TABLES})
    if head.columns != layout or base + _end(layout) != len(data):
        raise ValueError("another layout")
    tables: dict[str, dict[str, Any]] = {name: {} for name in _TABLES}
    checksum = 0
    for column in layout:
        values = _mapped(data[base:], column)
        checksum = zlib.crc32(values.data, checksum)
        tables[column.table][column.column] = values
    if checksum != head.checksum:
        raise ValueError("damaged columns")
    trace = Trace(
        path=path,
        **{name: getattr(head, name) for name in _TRACE_FIELDS},
        **{name: kind(**tables[name]) for name, kind in _TABLES.items()},
    )
    if broken := find_inconsistency(trace):
        raise ValueError(broken)
    return trace


def _head(data: NDArray[np.uint8]) -> tuple[_Head, int]:
    """The head, and where the columns begin."""
    if data[: len(MAGIC)].tobytes() != MAGIC:
        raise ValueError("not an entry")
    sizes = data[len(MAGIC) : _START].tobytes()
    size, expected = int.from_bytes(sizes[:8], "little"), int.from_bytes(sizes[8:], "little")
    if size > min(_MAX_HEAD_BYTES, len(data) - _START):
        raise ValueError("a head longer than the entry")
    text = data[_START : _START + size].tobytes()
    if zlib.crc32(text) != expected:
        raise ValueError("damaged head")
    return msgspec.json.decode(text, type=_Head), _aligned(_START + size)


def _layout(counts: dict[str, int]) -> list[_Column]:
    """Every column of tables with these numbers of rows, one after the other."""
    columns, offset = [], 0
    for table, kind in _TABLES.items():
        count = counts[table]
        if count < 0:
            raise ValueError(f"no table {table}")
        for name, dtype in column_types(kind).items():
            columns.append(_Column(table, name, dtype.str, offset, count))
            offset += _aligned(count * dtype.itemsize)
    return columns


def _end(layout: list[_Column]) -> int:
    last = layout[-1]
    return last.offset + _aligned(last.count * np.dtype(last.dtype).itemsize)


def _column_values(trace: Trace, column: _Column) -> NDArray[Any]:
    values = np.ascontiguousarray(getattr(getattr(trace, column.table), column.column))
    if values.dtype.str != column.dtype or values.shape != (column.count,):
        raise ValueError(f"column {column.column} is not as declared")
    return values


def _mapped(data: NDArray[np.uint8], column: _Column) -> NDArray[Any]:
    dtype = np.dtype(column.dtype)
    values = data[column.offset : column.offset + column.count * dtype.itemsize]
    return np.asarray(values.view(dtype))


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


# The rules that every Trace keeps, and that code after the readers relies on.
#
# A Trace from a cache entry is checked against them: its file may hold anything.

KINDS = ("cuda", "rocm", "xpu", "mtia", "cpu")


def find_inconsistency(trace: Trace) -> str | None:
    """The first broken rule, in words; None if there is none."""
    rules = (_shapes, _indices, _times, _orders, _parents, _facts, _values, _collectives)
    return next((broken for rule in rules for broken in rule(trace)), None)


def _shapes(trace: Trace) -> Iterator[str]:
    for table in (trace.host, trace.device, trace.memory):
        for name, dtype in column_types(type(table)).items():
            column = getattr(table, name)
            if column.dtype != dtype or column.shape != (len(table),):
                yield f"column {name} of {type(table).__name__} has another type or length"


def _indices(trace: Trace) -> Iterator[str]:
    host, device, memory = trace.host, trace.device, trace.memory
    texts, calls, rows = len(trace.strings), len(trace.collectives), len(host)
    threads = len(trace.threads)
    for name, column, lowest, end in (
        ("host kind", host.kind, 0, len(HostKind)),
        ("host name", host.name, 0, texts),
        ("host thread", host.thread, 0, threads),
        ("shapes", host.shapes, ABSENT, texts),
        ("dtypes", host.dtypes, ABSENT, texts),
        ("strides", host.strides, ABSENT, texts),
        ("concrete", host.concrete, ABSENT, texts),
        ("host collective", host.collective, ABSENT, calls),
        ("parent", host.parent, ABSENT, rows),
        ("forward_of", host.forward_of, ABSENT, rows),
        ("device kind", device.kind, 0, len(DeviceKind)),
        ("device name", device.name, 0, texts),
        ("grid", device.grid, ABSENT, texts),
        ("device collective", device.collective, ABSENT, calls),
        ("launch", device.launch, ABSENT, rows),
        ("memory thread", memory.thread, 0, threads),
    ):
        if not _within(column, lowest, end):
            yield f"{name} points outside its table"


def _times(trace: Trace) -> Iterator[str]:
    host, device = trace.host, trace.device
    for column in (host.start_ns, device.start_ns, trace.memory.time_ns):
        if not _within(column, 1 - LIMIT_NS, LIMIT_NS):
            yield "a time lies centuries away"
    for column in (host.dur_ns, device.dur_ns):
        if not _within(column, 0, LIMIT_DUR_NS + 1):
            yield "a duration is negative or longer than 100 days"


def _orders(trace: Trace) -> Iterator[str]:
    host, device = trace.host, trace.device
    if not are_sorted(host.thread, host.start_ns, -host.dur_ns):
        yield "host events are not sorted"
    if not are_sorted(device.start_ns, device.dur_ns):
        yield "device events are not sorted"
    if not are_sorted(trace.memory.time_ns):
        yield "memory events are not sorted by time"


def _parents(trace: Trace) -> Iterator[str]:
    host = trace.host
    child = np.flatnonzero(host.parent >= 0)
    parent = host.parent[child]
    end = host.start_ns + host.dur_ns
    inside = (parent < child) & (host.thread[parent] == host.thread[child])
    if not (inside & (end[parent] >= end[child])).all():
        yield "an event's parent does not enclose it"
    if (host.forward_of == np.arange(len(host))).any():
        yield "an operator is its own forward operator"


def _facts(trace: Trace) -> Iterator[str]:
    if trace.kind not in KINDS:
        yield f"the kind of the device is {trace.kind!r}"
    ranks = (trace.rank or 0, trace.world_size or 0)
    if trace.events < 0 or min(ranks) < 0 or max(ranks) > MAX_RANKS:
        yield "a count or a rank cannot be true"


def _values(trace: Trace) -> Iterator[str]:
    """Values that plausible_values.py would have refused."""
    odd = OddValues()
    texts = [text.encode() for text in trace.strings]
    for name in ("host", "device", "memory"):
        table = getattr(trace, name)
        columns = {column: getattr(table, column) for column in table.__struct_fields__}
        limit_numbers(name, columns, odd)
        limit_texts(columns, texts, trace.strings, odd)
        if name == "memory":
            limit_sizes(columns, odd)
    if plausible_groups(list(trace.groups), odd) != trace.groups:
        yield "a process group holds a value that cannot be true"
    for note in odd.notes():
        yield note.detail


def _collectives(trace: Trace) -> Iterator[str]:
    for call in trace.collectives:
        elements = (call.in_elements, call.out_elements)
        ranks = (call.group_size, call.source_rank, call.destination_rank)
        if not (_known(elements, MAX_ELEMENTS) and _known(ranks, MAX_RANKS)):
            yield f"a number of {call.name} cannot be true"
        if not is_rank_text(call.group_ranks):
            yield f"the ranks of {call.name} cannot be true"
    for device in trace.devices:
        has_id = _known((device.id,), MAX_RANKS)
        if not has_id or not _known((device.memory_bytes,), MAX_EVENT_BYTES):
            yield f"a number of device {device.name} cannot be true"


def _known(numbers: tuple[int, ...], limit: int) -> bool:
    return all(ABSENT <= number <= limit for number in numbers)


def _within(column: Column, lowest: int, end: int) -> bool:
    """Whether all values lie in lowest..end - 1."""
    return not len(column) or bool(column.min() >= lowest and column.max() < end)
