"""An Nsight Systems SQLite export -> a Trace: what `nsys export --type sqlite` writes.

Tables and columns differ by version and by what was traced, so only those that exist are read. Of
the recorded environment, which may hold secrets, only RANK and WORLD_SIZE are taken.
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.errors import UnreadableInputError
from stepscope.records.quality import Note
from stepscope.records.trace import ABSENT, Device, DeviceKind, HostKind
from stepscope.records.words import counted
from stepscope.trace import nsys_words as words
from stepscope.trace.assemble import Facts, assemble
from stepscope.trace.columns import Codes, Collector
from stepscope.trace.database import TIMES, Database
from stepscope.trace.recover import Losses
from stepscope.trace.times import INVALID_NS, LIMIT_DUR_NS, LIMIT_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from stepscope.records.trace import Trace
    from stepscope.trace.database import Rows
    from stepscope.trace.files import Progress

    Int32 = NDArray[np.int32]
    Int64 = NDArray[np.int64]

NAME = "nsys"

_CUPTI = "CUPTI_ACTIVITY_KIND_"
_RANGES = "NVTX_EVENTS"
_OVERHEAD = "PROFILER_OVERHEAD"
_KERNEL_NAMES = ("demangledName", "shortName", "mangledName")
_DEVICE_COLUMNS = (
    *(*TIMES, "globalPid", "deviceId", "streamId", "correlationId", "graphNodeId", "graphId"),
    *(*_KERNEL_NAMES, "bytes", "copyKind", "srcKind", "dstKind", "memKind"),
    *("gridX", "gridY", "gridZ"),
)
_PRODUCT = ("EXPORT_PRODUCT_NAME", "EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION")
_PLACE = re.compile(r'(RANK|WORLD_SIZE)="?(\d{1,9})"?')
_LATEST_NS = LIMIT_NS // 2  # still a time after the session's start was added
_ABSOLUTE_FROM_NS = 10**18  # 2001; `nsys export --ts-normalize` has added the start already


def read_nsys(path: Path, progress: Progress | None = None) -> Trace:
    """Read, link and describe one export. Raises UnreadableInputError when it holds no events."""
    try:
        database = Database(path)
    except sqlite3.Error as error:
        raise _damaged(path, f"its list of tables: {error}") from None
    with closing(database):
        _refuse_foreign(path, database)
        database.watch(filter(_holds_events, database.tables), progress)
        reader = _Reader(database)
        reader.read()
        _refuse_empty(path, database, reader)
        facts = _facts(database, reader)
    return assemble(
        path=str(path),
        source=NAME,
        columns=reader.columns,
        facts=facts,
        quality=tuple(_notes(database, reader)),
    )


class _Reader:
    """Fills a Collector from the tables: device work first, then the calls, then the ranges."""

    def __init__(self, database: Database) -> None:
        self.losses = Losses()
        self.columns = Collector(self.losses)
        self.unnamed = 0
        self.busy: set[int] = set()  # processes with device work
        self._database = database
        self._processes = Codes()
        self._strings: dict[Any, str] = {
            key: value
            for key, value in database.records("StringIds", "id", "value")
            if isinstance(value, str)
        }
        devices = database.records("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId", "pid")
        self._gpus = {(pid, seen): gpu for gpu, seen, pid in devices if isinstance(gpu, int)}

    def read(self) -> None:
        self._read_device("KERNEL", DeviceKind.KERNEL, self._kernel_names)
        self._read_device("MEMCPY", DeviceKind.MEMCPY, self._copy_names)
        self._read_device("MEMSET", DeviceKind.MEMSET, self._memset_names)
        self._read_graphs()
        for table in (f"{_CUPTI}RUNTIME", f"{_CUPTI}DRIVER"):
            self._read_calls(table, HostKind.RUNTIME)
        self._read_calls(_OVERHEAD, HostKind.OVERHEAD)
        self._read_device("SYNCHRONIZATION", DeviceKind.SYNC, self._sync_names)
        self._read_ranges()
        self._read_thread_names()

    def _read_graphs(self) -> None:
        """Whole graphs, where the work inside them was not recorded node by node."""
        pieces = self.columns.device.pieces("correlation")
        known = np.unique(np.concatenate(pieces)) if pieces else None
        self._read_device("GRAPH_TRACE", DeviceKind.KERNEL, self._graph_names, known)

    def _read_device(
        self,
        table: str,
        kind: DeviceKind,
        names_of: Callable[[Rows], Int32],
        known: Int64 | None = None,
    ) -> None:
        for batch in self._database.batches(f"{_CUPTI}{table}", *_DEVICE_COLUMNS):
            self.columns.events += len(batch)
            rows = self._timed(batch)
            rows = rows.with_column("correlation", self._correlation(rows, rows["globalPid"] >> 24))
            if known is not None:
                rows = rows.where(~np.isin(rows["correlation"], known))
            if kind <= DeviceKind.MEMSET:
                self.busy.update(np.unique(rows["globalPid"] >> 24).tolist())
            self._add_device(rows, kind, names_of(rows))

    def _add_device(self, rows: Rows, kind: DeviceKind, name: Int32) -> None:
        absent = np.full(len(rows), ABSENT, dtype=np.int64)
        self.columns.device.add(
            kind=np.full(len(rows), kind, dtype=np.int8),
            name=name,
            lane=absent.astype(np.int32),
            device=self._device_ids(rows),
            stream=_int32(rows["streamId"]),
            start_ns=rows["start"],
            dur_ns=rows["end"] - rows["start"],
            correlation=rows["correlation"],
            size_bytes=rows["bytes"],
            grid=self._extent_codes(rows, "gridX", "gridY", "gridZ"),
            graph_node=rows["graphNodeId"],
            collective=absent.astype(np.int32),
        )

    def _read_calls(self, table: str, kind: HostKind) -> None:
        wanted = (*TIMES, "globalTid", "correlationId", "nameId")
        for batch in self._database.batches(table, *wanted):
            self.columns.events += len(batch)
            rows = self._timed(batch)
            self._add_host(
                rows,
                kind=np.full(len(rows), kind, dtype=np.int8),
                name=self._string_codes(rows["nameId"], words.call_name),
                correlation=self._correlation(rows, rows["globalTid"] >> 24),
            )

    def _read_ranges(self) -> None:
        wanted = (*TIMES, "globalTid", "eventType", "textId")
        codes = words.RangeCodes(self.columns)
        for batch in self._database.batches(_RANGES, *wanted, text="text"):
            self.columns.events += len(batch)
            kind, ended = batch["eventType"], batch["end"] != INVALID_NS
            ranged = np.isin(kind, words.RANGE_TYPES) | ((kind == ABSENT) & ended)
            rows = self._timed(batch.where(ranged))
            distinct = Codes()
            place = distinct.of(self._range_texts(rows))
            parsed = np.array([codes.of(text) for text in distinct], dtype=np.int64)
            parsed = parsed.reshape(-1, 5)[place]
            scope = self._scope(rows["globalTid"] >> 24)
            self._add_host(
                rows,
                kind=parsed[:, 0].astype(np.int8),
                name=parsed[:, 1].astype(np.int32),
                shapes=parsed[:, 2].astype(np.int32),
                forward_thread=parsed[:, 3].astype(np.int32),
                sequence=np.where(parsed[:, 4] >= 0, parsed[:, 4] + scope, ABSENT),
            )

    def _range_texts(self, rows: Rows) -> list[str]:
        """Written in the row itself, or registered once and referred to."""
        pairs = zip(rows.texts, rows["textId"].tolist(), strict=True)
        return [text or self._strings.get(key) or words.UNNAMED for text, key in pairs]

    def _add_host(self, rows: Rows, **columns: NDArray[Any]) -> None:
        absent = np.full(len(rows), ABSENT, dtype=np.int64)
        narrow = absent.astype(np.int32)
        wide = ("correlation", "sequence")
        codes = ("forward_thread", "shapes", "dtypes", "concrete", "collective")
        defaults = dict.fromkeys(wide, absent) | dict.fromkeys(codes, narrow)
        self.columns.host.add(
            **{**defaults, **columns},
            thread=self._lane_codes(rows["globalTid"]),
            start_ns=rows["start"],
            dur_ns=rows["end"] - rows["start"],
        )

    def _read_thread_names(self) -> None:
        for name, thread in self._database.records("ThreadNames", "nameId", "globalTid"):
            if isinstance(thread, int):
                self.columns.thread_names[_lane(thread)] = self._strings.get(name, "")

    def _timed(self, rows: Rows) -> Rows:
        """The rows with a usable start and duration; the others are counted."""
        start, end = rows["start"], rows["end"]
        # CUPTI writes zeros where it could not take the time.
        no_start = (start <= -_LATEST_NS) | (start >= _LATEST_NS) | ((start == 0) & (end == 0))
        no_end = ~no_start & ((end <= -_LATEST_NS) | (end >= _LATEST_NS))
        dur = np.where(no_start | no_end, 0, end - start)
        losses = {
            "without a usable start": no_start,
            "without an end": no_end,
            "with a negative duration": dur < 0,
            "longer than 100 days": dur > LIMIT_DUR_NS,
        }
        good = np.ones(len(rows), dtype=bool)
        for reason, bad in losses.items():
            self.losses.count(reason, int(bad.sum()))
            good &= ~bad
        return rows.where(good)

    def _correlation(self, rows: Rows, process: Int64) -> Int64:
        ids = rows["correlationId"]
        if ABSENT in self.busy:  # old exports do not say whose the device work is
            return ids
        return np.where(ids >= 0, ids + self._scope(process), ABSENT)

    def _scope(self, process: Int64) -> Int64:
        """Every process counts its calls and operators from one: keep those of several apart."""

        def codes(keys: list[int]) -> Int64:
            return np.array([self._processes[key] if key >= 0 else 0 for key in keys], np.int64)

        return _by_distinct(process, codes) << 32

    def _device_ids(self, rows: Rows) -> Int32:
        """The machine's numbers of GPUs; a process may see only some, counted from zero."""
        seen = _int32(rows["deviceId"])
        if not self._gpus:
            return seen
        pid = (rows["globalPid"] >> 24) & 0xFFFFFF
        pairs = Codes()
        place = pairs.of(list(zip(pid.tolist(), seen.tolist(), strict=True)))
        found = [self._gpus.get(pair, pair[1]) for pair in pairs]
        return _int32(np.array(found, dtype=np.int64)[place])

    def _lane_codes(self, thread: Int64) -> Int32:
        codes = _by_distinct(thread, lambda keys: self.columns.lanes.of(list(map(_lane, keys))))
        return codes.astype(np.int32)

    def _string_codes(self, ids: Int64, clean: Callable[[str], str] = str) -> Int32:
        distinct, place, count = np.unique(ids, return_inverse=True, return_counts=True)
        texts = [self._strings.get(key) for key in distinct.tolist()]
        lost = np.array([text is None for text in texts], dtype=bool)
        self.unnamed += int(count[lost].sum())
        names = [words.UNNAMED if text is None else clean(text) for text in texts]
        return self.columns.names.of(names)[place]

    def _kernel_names(self, rows: Rows) -> Int32:
        column = next((name for name in _KERNEL_NAMES if name in rows.columns), _KERNEL_NAMES[0])
        return self._string_codes(rows[column])

    def _copy_names(self, rows: Rows) -> Int32:
        kinds = (rows[column].tolist() for column in ("copyKind", "srcKind", "dstKind"))
        return self._name_each(zip(*kinds, strict=True), words.copy_name)

    def _memset_names(self, rows: Rows) -> Int32:
        return self._name_each(rows["memKind"].tolist(), words.memset_name)

    def _graph_names(self, rows: Rows) -> Int32:
        return self._name_each(rows["graphId"].tolist(), words.graph_name)

    def _sync_names(self, rows: Rows) -> Int32:
        ids, names = self._calls
        place = np.minimum(np.searchsorted(ids, rows["correlation"]), len(ids) - 1)
        called = (ids[place] == rows["correlation"]) & (rows["correlation"] > 0)
        texts = ["", *self.columns.names]
        codes = np.where(called, names[place], ABSENT).tolist()
        return self._name_each(codes, lambda code: words.sync_name(texts[code + 1]))

    @cached_property
    def _calls(self) -> tuple[Int64, Int32]:
        """Correlations of all calls, sorted, and the calls' names; never empty."""
        host = self.columns.host
        ids = np.concatenate([*host.pieces("correlation"), np.array([ABSENT], dtype=np.int64)])
        names = np.concatenate([*host.pieces("name"), np.array([ABSENT], dtype=np.int32)])
        order = np.argsort(ids, kind="stable")
        return ids[order], names[order]

    def _name_each(self, keys: Iterable[Any], name_of: Callable[[Any], str]) -> Int32:
        distinct = Codes()
        place = distinct.of(list(keys))
        return self.columns.names.of([name_of(key) for key in distinct])[place]

    def _extent_codes(self, rows: Rows, *axes: str) -> Int32:
        if axes[0] not in rows.columns:
            return np.full(len(rows), ABSENT, dtype=np.int32)
        distinct = Codes()
        place = distinct.of(list(zip(*(rows[axis].tolist() for axis in axes), strict=True)))
        return self.columns.texts.of([str(list(extent)).encode() for extent in distinct])[place]


def _by_distinct(values: Int64, of: Callable[[list[int]], NDArray[Any]]) -> NDArray[Any]:
    distinct, place = np.unique(values, return_inverse=True)
    return of(distinct.tolist())[place]


def _lane(thread: int) -> tuple[int, int]:
    """Process and thread of a serialised global id."""
    return ((thread >> 24) & 0xFFFFFF, thread & 0xFFFFFF) if thread >= 0 else (ABSENT, ABSENT)


def _int32(values: Int64) -> Int32:
    fits = np.abs(values) <= np.iinfo(np.int32).max
    return np.where(fits, values, ABSENT).astype(np.int32)


def _facts(database: Database, reader: _Reader) -> Facts:
    place = {} if _several_processes(reader) else _place(database)
    product = database.records("META_DATA_EXPORT", "name", "value")
    return Facts(
        kind="cuda",
        rank=place.get("RANK"),
        world_size=place.get("WORLD_SIZE"),
        devices=_devices(database),
        base_ns=_session_start(database, reader.columns),
        others={name: str(value) for name, value in product if name in _PRODUCT},
    )


def _place(database: Database) -> dict[str, int]:
    """Rank and world size from the environment that the process was started with."""
    found = {}
    for name, value in database.records("META_DATA_CAPTURE", "name", "value"):
        if str(name).endswith("ENVIRONMENT_VARIABLE") and isinstance(value, str):
            match = _PLACE.fullmatch(value)
            if match:
                found[match[1]] = int(match[2])
    return found


def _devices(database: Database) -> tuple[Device, ...]:
    rows = database.records("TARGET_INFO_GPU", "id", "name", "totalMemory", "smCount")
    if not rows:  # before mid 2021
        columns = ("deviceId", "name", "globalMemorySize", "numMultiprocessors")
        rows = database.records("TARGET_INFO_CUDA_GPU", *columns)

    def whole(value: Any) -> int:
        return value if isinstance(value, int) else ABSENT

    return tuple(
        Device(
            id=whole(key),
            name=str(name or ""),
            memory_bytes=whole(memory),
            multiprocessors=whole(processors),
        )
        for key, name, memory, processors in rows
    )


def _session_start(database: Database, columns: Collector) -> int:
    rows = database.records("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
    value = rows[0][0] if rows else None
    if not isinstance(value, int) or not 0 < value < _LATEST_NS:
        return 0
    pieces = columns.device.pieces("start_ns") + columns.host.pieces("start_ns")
    absolute = any(len(piece) and np.median(piece) > _ABSOLUTE_FROM_NS for piece in pieces)
    return 0 if absolute else value


def _holds_events(table: str) -> bool:
    return table.startswith(_CUPTI) or table in (_RANGES, _OVERHEAD)


def _refuse_foreign(path: Path, database: Database) -> None:
    tables = database.tables
    if "StringTable" in tables and "StringIds" not in tables:
        raise UnreadableInputError(
            f"{path} is a database of nvprof or the Visual Profiler: record the run with "
            "`nsys profile --trace cuda,nvtx`, then `nsys export --type sqlite`"
        )
    if any(map(_holds_events, tables)):
        return
    if database.damaged:
        raise _damaged(path, _where(database))
    if "META_DATA_EXPORT" in tables or "StringIds" in tables:
        raise UnreadableInputError(
            f"{path} is an Nsight Systems export without CUDA or NVTX events: record the run with "
            "`nsys profile --trace cuda,nvtx`"
        )
    seen = ", ".join(sorted(tables)[:6]) + (", ..." if len(tables) > 6 else "")
    raise UnreadableInputError(
        f"{path} is a SQLite database of another tool (tables: {seen or 'none'}); "
        "expected an export of `nsys export --type sqlite`"
    )


def _refuse_empty(path: Path, database: Database, reader: _Reader) -> None:
    columns, malformed = reader.columns, reader.losses.malformed
    if columns.known_rows() and set(columns.names) != {words.UNNAMED}:
        return
    if database.damaged:
        raise _damaged(path, _where(database))
    if malformed:
        why = ", ".join(f"{count} {reason}" for reason, count in malformed.items())
        raise UnreadableInputError(
            f"{path}: none of its events ({columns.events:,}) is usable ({why})"
        )
    if columns.known_rows():
        raise UnreadableInputError(
            f"{path} holds no names of its events ({columns.events:,}) (table "
            "StringIds): export it "
            "again with all tables"
        )
    raise UnreadableInputError(
        f"{path} holds no CUDA calls, device work or NVTX ranges: was the capture range ever "
        "entered, and was `--trace cuda,nvtx` given to `nsys profile`?"
    )


def _damaged(path: Path, where: str) -> UnreadableInputError:
    return UnreadableInputError(
        f"{path} is damaged, encrypted or cut off and cannot be read ({where}): "
        "export it again from the report with `nsys export --type sqlite`"
    )


def _where(database: Database) -> str:
    return "; ".join(f"table {table}: {error}" for table, error in database.damaged.items())


def _notes(database: Database, reader: _Reader) -> list[Note]:
    notes = [
        Note(id="malformed", detail=f"left out: {counted(count, 'event')} {reason}", count=count)
        for reason, count in reader.losses.malformed.items()
    ]
    if database.damaged:
        detail = (
            f"the database is damaged or cut off ({_where(database)}); "
            f"read before that: {counted(reader.columns.events, 'event')}"
        )
        notes.append(Note(id="truncated", detail=detail, count=len(database.damaged)))
    if reader.unnamed:
        detail = f"the file does not hold the names of {counted(reader.unnamed, 'event')}"
        notes.append(Note(id="unnamed", detail=detail, count=reader.unnamed))
    pids = _several_processes(reader)
    if pids:
        detail = (
            f"{len(pids)} processes in one export (pids {', '.join(map(str, pids[:8]))}) are read "
            "as one; to compare them, record each rank by itself: `nsys profile -o rank-%q{RANK}`"
        )
        notes.append(Note(id="several-processes", detail=detail, count=len(pids)))
    return notes


def _several_processes(reader: _Reader) -> list[int]:
    """Pids, when more than one did device work, or none did and more than one was recorded."""
    busy = sorted(process & 0xFFFFFF for process in reader.busy if process >= 0)
    pids = busy or sorted({pid for pid, _ in reader.columns.lanes})
    return pids if len(pids) > 1 else []
