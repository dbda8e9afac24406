"""An Nsight Systems SQLite export -> a Trace: what `nsys export --type sqlite` writes.

Tables and columns differ by version and by what was traced, so only those that exist are read. Of
the recorded environment, which may hold secrets, only RANK and WORLD_SIZE are taken.
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.errors import UnreadableInputError
from stepscope.records.limits import MOST_RANKS
from stepscope.records.quality import Note
from stepscope.records.trace import ABSENT, Device, DeviceKind, HostKind
from stepscope.records.words import counted
from stepscope.trace import links
from stepscope.trace import nsys_words as words
from stepscope.trace.assemble import Facts, assemble
from stepscope.trace.columns import Codes, Collector
from stepscope.trace.database import ANY, MOST_CHARACTERS, TIMES, Database
from stepscope.trace.plausible import (
    MOST_BYTES,
    MOST_DEVICES,
    MOST_IDS,
    is_whole,
)
from stepscope.trace.recover import Losses
from stepscope.trace.regular_files import unreadable
from stepscope.trace.times import INVALID_NS, LIMIT_DUR_NS, LIMIT_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from stepscope.records.trace import Trace
    from stepscope.trace.database import Rows
    from stepscope.trace.files import Progress
    from stepscope.trace.plausible import OddValues

    Int32 = NDArray[np.int32]
    Int64 = NDArray[np.int64]

NAME = "nsys"

_CUPTI = "CUPTI_ACTIVITY_KIND_"
_RANGES = "NVTX_EVENTS"
_OVERHEAD = "PROFILER_OVERHEAD"
_KERNEL_NAMES = ("demangledName", "shortName", "mangledName")
_MOST_PIDS = 2**24 - 1  # and threads
_UNSIGNED = 2**32 - 1  # also what CUPTI writes for "none" or "all"
_MOST_GRID_SIDE = 2**16 - 1  # CUDA's limit for y and z; x may be as large as an int
# The largest value that a column can mean; what is beyond is counted and not captured.
_TIMED = dict.fromkeys(TIMES, ANY)
_DEVICE = _TIMED | {
    "globalPid": ANY,
    "deviceId": MOST_DEVICES,
    "streamId": _UNSIGNED,
    "correlationId": _UNSIGNED,
    "graphNodeId": MOST_IDS,
}
_GRID = {"gridX": 2**31 - 1, "gridY": _MOST_GRID_SIDE, "gridZ": _MOST_GRID_SIDE}
_COPY = dict.fromkeys(("copyKind", "srcKind", "dstKind"), _UNSIGNED) | {"bytes": MOST_BYTES}
_SET = {"memKind": _UNSIGNED, "bytes": MOST_BYTES}
_GRAPH = {"graphId": ANY}
_CALL = _TIMED | {"globalTid": ANY, "correlationId": _UNSIGNED, "nameId": ANY}
_RANGE = _TIMED | {"globalTid": ANY, "eventType": _UNSIGNED, "textId": ANY}
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
    except OSError as error:
        raise unreadable(path, error) from None
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
        self._gpus = {(pid, seen): gpu for gpu, seen, pid in devices if is_whole(gpu, MOST_DEVICES)}

    def read(self) -> None:
        self._read_kernels()
        self._read_device("MEMCPY", DeviceKind.MEMCPY, _COPY, self._copy_names)
        self._read_device("MEMSET", DeviceKind.MEMSET, _SET, self._memset_names)
        self._read_graphs()
        for table in (f"{_CUPTI}RUNTIME", f"{_CUPTI}DRIVER"):
            self._read_calls(table, HostKind.RUNTIME)
        self._read_calls(_OVERHEAD, HostKind.OVERHEAD)
        self._read_waits()
        self._read_ranges()
        self._read_thread_names()

    def _read_kernels(self) -> None:
        have = self._database.columns(f"{_CUPTI}KERNEL")
        name = next((n for n in _KERNEL_NAMES if n.lower() in have), _KERNEL_NAMES[0])
        columns = _GRID | {name: ANY}
        names_of = partial(self._names_in, name)
        self._read_device("KERNEL", DeviceKind.KERNEL, columns, names_of)

    def _names_in(self, column: str, rows: Rows) -> Int32:
        return self._string_codes(rows[column])

    def _read_graphs(self) -> None:
        """Whole graphs, where the work inside them was not recorded node by node."""
        if not self._database.columns(f"{_CUPTI}GRAPH_TRACE"):
            return
        known = links.distinct(self.columns.device.column("correlation"))
        for rows in self._device_rows("GRAPH_TRACE", DeviceKind.KERNEL, _GRAPH, known):
            self._add_device(rows, DeviceKind.KERNEL, self._graph_names(rows))

    def _read_waits(self) -> None:
        """Named after the calls that wait, which are looked up once for all of them."""
        waits = list(self._device_rows("SYNCHRONIZATION", DeviceKind.SYNC, {}))
        if waits:
            calls = self._call_names(np.concatenate([rows["correlation"] for rows in waits]))
            for rows in waits:
                names = _by_distinct(rows["correlation"], partial(self._wait_names, calls))
                self._add_device(rows, DeviceKind.SYNC, names)

    def _call_names(self, wanted: Int64) -> dict[int, int]:
        """Correlations -> names of the first calls with them."""
        ids, codes = self.columns.host.column("correlation"), self.columns.host.column("name")
        found = np.isin(ids, wanted[wanted > 0])
        pairs = zip(ids[found][::-1].tolist(), codes[found][::-1].tolist(), strict=True)
        return dict(pairs)

    def _wait_names(self, calls: dict[int, int], ids: list[int]) -> Int32:
        texts = list(self.columns.names)
        called = (texts[calls[key]] if key in calls else "" for key in ids)
        return self.columns.names.of([words.sync_name(call) for call in called])

    def _read_device(
        self,
        table: str,
        kind: DeviceKind,
        columns: dict[str, int],
        names_of: Callable[[Rows], Int32],
    ) -> None:
        for rows in self._device_rows(table, kind, columns):
            self._add_device(rows, kind, names_of(rows))

    def _device_rows(
        self,
        table: str,
        kind: DeviceKind,
        columns: dict[str, int],
        known: Int64 | None = None,
    ) -> Iterator[Rows]:
        """Without those whose correlations are known already."""
        for batch in self._batches(f"{_CUPTI}{table}", _DEVICE | columns):
            rows = self._timed(batch)
            process = rows["globalPid"] >> 24
            rows = rows.with_column("correlation", self._correlation(rows, process))
            if known is not None:
                rows = rows.where(~np.isin(rows["correlation"], known))
            if len(rows):
                if kind <= DeviceKind.MEMSET:
                    self.busy.update(_distinct(rows["globalPid"] >> 24).tolist())
                yield rows

    def _batches(
        self, table: str, columns: dict[str, int], text: str | None = None
    ) -> Iterator[Rows]:
        for batch in self._database.batches(table, columns, self.columns.odd, text=text):
            self.columns.events += len(batch)
            yield batch

    def _add_device(self, rows: Rows, kind: DeviceKind, name: Int32) -> None:
        self.columns.device.add(
            kind=_repeated(kind, len(rows), np.int8),
            name=name,
            lane=_repeated(ABSENT, len(rows), np.int32),
            device=self._device_ids(rows),
            stream=_int32(rows["streamId"]),
            start_ns=rows["start"],
            dur_ns=rows["end"] - rows["start"],
            correlation=rows["correlation"],
            size_bytes=rows["bytes"],
            grid=self._grid_codes(rows),
            graph_node=rows["graphNodeId"],
            collective=_repeated(ABSENT, len(rows), np.int32),
        )

    def _read_calls(self, table: str, kind: HostKind) -> None:
        for batch in self._batches(table, _CALL):
            rows = self._timed(batch)
            if not len(rows):
                continue
            self._add_host(
                rows,
                kind=_repeated(kind, len(rows), np.int8),
                name=self._string_codes(rows["nameId"], words.call_name),
                correlation=self._correlation(rows, rows["globalTid"] >> 24),
            )

    def _read_ranges(self) -> None:
        codes = words.RangeCodes(self.columns)
        for batch in self._batches(_RANGES, _RANGE, text="text"):
            kind, ended = batch["eventType"], batch["end"] != INVALID_NS
            ranged = np.isin(kind, words.RANGE_TYPES) | ((kind == ABSENT) & ended)
            rows = self._timed(batch.where(ranged))
            if not len(rows):
                continue
            distinct = Codes()
            place = distinct.of(self._range_texts(rows))
            parsed = np.array([codes.of(text) for text in distinct], dtype=np.int64)[place]
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
        texts = [text or self._strings.get(key) or words.UNNAMED for text, key in pairs]
        self.unnamed += texts.count(words.UNNAMED)
        return texts

    def _add_host(self, rows: Rows, **columns: NDArray[Any]) -> None:
        absent = _repeated(ABSENT, len(rows), np.int64)
        narrow = _repeated(ABSENT, len(rows), np.int32)
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
            if is_whole(thread, ANY):
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
        seen = rows["deviceId"]
        pid = (rows["globalPid"] >> 24) & _MOST_PIDS

        def numbers(keys: list[int]) -> Int64:
            pairs = ((key >> 24, (key & _MOST_PIDS) - 1) for key in keys)
            return np.array([self._gpus.get(pair, pair[1]) for pair in pairs], dtype=np.int64)

        return _int32(_by_distinct(pid << 24 | (seen + 1), numbers))

    def _lane_codes(self, thread: Int64) -> Int32:
        codes = _by_distinct(thread, lambda keys: self.columns.lanes.of(list(map(_lane, keys))))
        return _narrow(codes)

    def _string_codes(self, ids: Int64, clean: Callable[[str], str] = str) -> Int32:
        def codes(keys: list[int]) -> Int32:
            texts = (self._strings.get(key) for key in keys)
            return self.columns.names.of(
                [words.UNNAMED if text is None else clean(text) for text in texts]
            )

        found: Int32 = _by_distinct(ids, codes)
        self.unnamed += int((found == self.columns.names.get(words.UNNAMED, ABSENT)).sum())
        return found

    def _copy_names(self, rows: Rows) -> Int32:
        kinds = (rows[column].tolist() for column in ("copyKind", "srcKind", "dstKind"))
        return self._name_each(zip(*kinds, strict=True), words.copy_name)

    def _memset_names(self, rows: Rows) -> Int32:
        return self._name_each(rows["memKind"].tolist(), words.memset_name)

    def _graph_names(self, rows: Rows) -> Int32:
        return self._name_each(rows["graphId"].tolist(), words.graph_name)

    def _name_each(self, keys: Iterable[Any], name_of: Callable[[Any], str]) -> Int32:
        distinct = Codes()
        place = distinct.of(list(keys))
        return self.columns.names.of([name_of(key) for key in distinct])[place]

    def _grid_codes(self, rows: Rows) -> Int32:
        x, y, z = rows["gridX"], rows["gridY"], rows["gridZ"]
        whole = (x > 0) & (y > 0) & (z > 0)
        return _by_distinct(np.where(whole, x << 32 | y << 16 | z, ABSENT), self._grid_texts)

    def _grid_texts(self, keys: list[int]) -> Int32:
        def code(key: int) -> int:
            sides = [key >> 32, key >> 16 & _MOST_GRID_SIDE, key & _MOST_GRID_SIDE]
            return self.columns.texts[str(sides).encode()]

        return np.array([code(key) if key >= 0 else ABSENT for key in keys], dtype=np.int32)


def _repeated(value: int, count: int, dtype: Any) -> NDArray[Any]:
    """A column of one value, which takes no memory."""
    return np.broadcast_to(np.array(value, dtype), count)


def _distinct(values: Int64) -> Int64:
    return values[:1] if (values == values[:1]).all() else links.distinct(values)


def _by_distinct(values: Int64, of: Callable[[list[int]], NDArray[Any]]) -> NDArray[Any]:
    """`of` is asked once for each different value."""
    distinct = _distinct(values)
    if len(distinct) == 1:
        return np.broadcast_to(of(distinct.tolist()), len(values))
    return of(distinct.tolist())[np.searchsorted(distinct, values)]


def _lane(thread: int) -> tuple[int, int]:
    """Process and thread of a serialised global id."""
    if thread < 0:
        return ABSENT, ABSENT
    return (thread >> 24) & _MOST_PIDS, thread & _MOST_PIDS


def _int32(values: Int64) -> Int32:
    return _narrow(np.where(values <= np.iinfo(np.int32).max, values, ABSENT))


def _narrow(values: NDArray[Any]) -> Int32:
    if values.strides == (0,):
        return np.broadcast_to(values[:1].astype(np.int32), len(values))
    return values.astype(np.int32)


def _facts(database: Database, reader: _Reader) -> Facts:
    place = {} if _several_processes(reader) else _place(database)
    product = database.records("META_DATA_EXPORT", "name", "value")
    return Facts(
        kind="cuda",
        rank=place.get("RANK"),
        world_size=place.get("WORLD_SIZE"),
        devices=_devices(database, reader.columns.odd),
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
    return {name: number for name, number in found.items() if number <= MOST_RANKS}


def _devices(database: Database, odd: OddValues) -> tuple[Device, ...]:
    table, columns = "TARGET_INFO_GPU", ("id", "name", "totalMemory", "smCount")
    if not database.columns(table):  # before mid 2021
        table = "TARGET_INFO_CUDA_GPU"
        columns = ("deviceId", "name", "globalMemorySize", "numMultiprocessors")

    def whole(column: str, value: Any, most: int) -> int:
        if value is not None and not is_whole(value, most):
            odd.add(f"{table}.{column}", 1, value)
        return value if is_whole(value, most) else ABSENT

    return tuple(
        Device(
            id=whole(columns[0], key, MOST_DEVICES),
            name=name if isinstance(name, str) else "",
            memory_bytes=whole(columns[2], memory, MOST_BYTES),
            multiprocessors=whole(columns[3], processors, MOST_DEVICES),
        )
        for key, name, memory, processors in database.records(table, *columns)
    )


def _session_start(database: Database, columns: Collector) -> int:
    rows = database.records("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
    value = rows[0][0] if rows else None
    if not isinstance(value, int) or not 0 < value < _LATEST_NS:
        return 0
    starts = columns.device.column("start_ns"), columns.host.column("start_ns")
    absolute = any((column > _ABSOLUTE_FROM_NS).mean() > 0.5 for column in starts if len(column))
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
    if computed := sorted(filter(_holds_events, database.computed)):
        raise UnreadableInputError(
            f"{path}: {', '.join(computed[:6])} would have to be computed (a view or a virtual "
            "table); only plain tables are read: export the report again with "
            "`nsys export --type sqlite`"
        )
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
    if left_out := sorted(filter(_holds_events, database.computed)):
        detail = (
            f"left out: {', '.join(left_out[:8])}: a view or a virtual table, which would have to "
            "be computed; only plain tables are read"
        )
        notes.append(Note(id="computed-tables", detail=detail, count=len(left_out)))
    if database.unfinished:
        detail = (
            f"{database.unfinished} lies beside the database: what is only in that file is not "
            "read; export the report again if events are missing"
        )
        notes.append(Note(id="unfinished-export", detail=detail))
    if database.cut_texts:
        detail = (
            f"cut after {MOST_CHARACTERS:,} characters: {counted(database.cut_texts, 'text')} of "
            "the file"
        )
        notes.append(Note(id="cut-texts", detail=detail, count=database.cut_texts))
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
