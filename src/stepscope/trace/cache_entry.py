"""One file of the cache: a Trace as a head of JSON, then its columns as they are in memory.

An entry is refused if its list of columns differs in any name, type, offset or length from what
this version writes, or if its values break a rule of consistency.py, whatever its checksums.
"""

from __future__ import annotations

import zlib
from typing import IO, TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.records.quality import Note  # noqa: TC001  (decoding needs it)
from stepscope.records.trace import (
    CollectiveArgs,
    Device,
    DeviceEvents,
    HostEvents,
    MemoryEvents,
    Thread,
    Trace,
)
from stepscope.trace.column_types import column_types
from stepscope.trace.consistency import find_inconsistency

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


def entry_bytes(trace: Trace) -> int:
    """The size of the entry without its head."""
    return _end(_layout({name: len(getattr(trace, name)) for name in _TABLES}))


def write_entry(file: IO[bytes], key: str, trace: Trace) -> None:
    """Raises ValueError for a trace that an entry cannot hold."""
    layout = _layout({name: len(getattr(trace, name)) for name in _TABLES})
    checksum = 0
    for column in layout:
        checksum = zlib.crc32(_values(trace, column).data, checksum)
    fields = {name: getattr(trace, name) for name in _TRACE_FIELDS}
    head = msgspec.json.encode(_Head(key=key, columns=layout, checksum=checksum, **fields))
    if len(head) > _MAX_HEAD_BYTES:
        raise ValueError("the head is too long")
    sizes = len(head).to_bytes(8, "little") + zlib.crc32(head).to_bytes(8, "little")
    begin = MAGIC + sizes + head
    file.write(begin + b"\0" * (-len(begin) % _ALIGN))
    for column in layout:
        values = _values(trace, column)
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


def _values(trace: Trace, column: _Column) -> NDArray[Any]:
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
