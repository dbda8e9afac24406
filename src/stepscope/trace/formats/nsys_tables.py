"""Read the tables of an Nsight Systems export into columns (device work, calls, NVTX
ranges), with names in the words that Kineto uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.quality import MAX_EVENT_BYTES
from stepscope.records.trace import ABSENT, DeviceKind, HostKind, Int32, Int64
from stepscope.trace import links
from stepscope.trace.formats.columns import Codes, Collector
from stepscope.trace.formats.decode_events import Losses
from stepscope.trace.formats.plausible_values import (
    INVALID_NS,
    LIMIT_DUR_NS,
    LIMIT_NS,
    MAX_DEVICES,
    MAX_IDS,
    is_whole,
)
from stepscope.trace.formats.sqlite import ANY, TIMES, Database, TableRows

LATEST_NS = LIMIT_NS // 2  # still a time after the session's start was added
_CUPTI = "CUPTI_ACTIVITY_KIND_"
_RANGES = "NVTX_EVENTS"
_OVERHEAD = "PROFILER_OVERHEAD"
_KERNEL_NAMES = ("demangledName", "shortName", "mangledName")
_MAX_ID = 2**24 - 1  # of a process or a thread
_UNSIGNED = 2**32 - 1  # also what CUPTI writes for "none" or "all"
_MAX_GRID_SIDE = 2**16 - 1  # CUDA's limit for y and z; x may be as large as an int
# The largest value that each column can hold; larger ones are counted and not captured.
_TIMED = dict.fromkeys(TIMES, ANY)
_DEVICE = _TIMED | {
    "globalPid": ANY,
    "deviceId": MAX_DEVICES,
    "streamId": _UNSIGNED,
    "correlationId": _UNSIGNED,
    "graphNodeId": MAX_IDS,
}
_GRID = {"gridX": 2**31 - 1, "gridY": _MAX_GRID_SIDE, "gridZ": _MAX_GRID_SIDE}
_COPY = dict.fromkeys(("copyKind", "srcKind", "dstKind"), _UNSIGNED) | {"bytes": MAX_EVENT_BYTES}
_SET = {"memKind": _UNSIGNED, "bytes": MAX_EVENT_BYTES}
_GRAPH = {"graphId": ANY}
_CALL = _TIMED | {"globalTid": ANY, "correlationId": _UNSIGNED, "nameId": ANY}
_RANGE = _TIMED | {"globalTid": ANY, "eventType": _UNSIGNED, "textId": ANY}


def holds_events(table: str) -> bool:
    return table.startswith(_CUPTI) or table in (_RANGES, _OVERHEAD)


class NsysTables:
    """Fills a Collector from the tables: device work first, then the calls, then the ranges."""

    def __init__(self, database: Database) -> None:
        self.losses = Losses()
        self.columns = Collector(self.losses)
        self.unnamed = 0  # events whose name the file does not hold
        self._busy: set[int] = set()  # processes with device work
        self._database = database
        self._processes = Codes()
        self._strings: dict[Any, str] = {
            key: value
            for key, value in database.records("StringIds", "id", "value")
            if isinstance(value, str)
        }
        devices = database.records("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId", "pid")
        self._gpus = {  # (process, its number for a GPU) -> the machine's number
            (pid, device): gpu for gpu, device, pid in devices if is_whole(gpu, MAX_DEVICES)
        }

    def read(self) -> None:
        have = self._database.columns(f"{_CUPTI}KERNEL")
        column = next((n for n in _KERNEL_NAMES if n.lower() in have), _KERNEL_NAMES[0])
        self._read_device(
            "KERNEL",
            DeviceKind.KERNEL,
            _GRID | {column: ANY},
            lambda rows: self._string_codes(rows[column]),
        )
        self._read_device("MEMCPY", DeviceKind.MEMCPY, _COPY, self._copy_names)
        self._read_device("MEMSET", DeviceKind.MEMSET, _SET, self._memset_names)
        self._read_graphs()
        for table in (f"{_CUPTI}RUNTIME", f"{_CUPTI}DRIVER"):
            self._read_calls(table, HostKind.RUNTIME)
        self._read_calls(_OVERHEAD, HostKind.OVERHEAD)
        # Waits are named after the calls that wait; these are looked up once for all.
        waits = list(self._device_rows("SYNCHRONIZATION", DeviceKind.SYNC, {}))
        if waits:
            calls = self._call_names(np.concatenate([rows["correlation"] for rows in waits]))
            for rows in waits:
                codes = _by_distinct(rows["correlation"], partial(self._wait_names, calls))
                self._add_device(rows, DeviceKind.SYNC, codes)
        self._read_ranges()
        for name, thread in self._database.records("ThreadNames", "nameId", "globalTid"):
            if is_whole(thread, ANY):
                self.columns.thread_names[_lane(thread)] = self._strings.get(name, "")

    def processes(self) -> list[int]:
        """The processes that did device work; if none did, all that were recorded."""
        busy = sorted(process & _MAX_ID for process in self._busy if process >= 0)
        return busy or sorted({pid for pid, _ in self.columns.lanes})

    def _read_graphs(self) -> None:
        """Whole graphs, if the work inside them was not recorded node by node."""
        if not self._database.columns(f"{_CUPTI}GRAPH_TRACE"):
            return
        nodes = links.distinct(self.columns.device.column("correlation"))
        for rows in self._device_rows("GRAPH_TRACE", DeviceKind.KERNEL, _GRAPH, nodes):
            graphs = self._distinct_names(rows["graphId"].tolist(), graph_name)
            self._add_device(rows, DeviceKind.KERNEL, graphs)

    def _call_names(self, wanted: Int64) -> dict[int, int]:
        """Correlation -> code of the first call's name."""
        ids, codes = self.columns.host.column("correlation"), self.columns.host.column("name")
        chosen = np.isin(ids, wanted[wanted > 0])
        pairs = zip(ids[chosen][::-1].tolist(), codes[chosen][::-1].tolist(), strict=True)
        return dict(pairs)

    def _wait_names(self, calls: dict[int, int], ids: list[int]) -> Int32:
        texts = list(self.columns.names)
        callers = (texts[calls[key]] if key in calls else "" for key in ids)
        return self.columns.names.encode([sync_name(caller) for caller in callers])

    def _read_device(
        self,
        table: str,
        kind: DeviceKind,
        columns: dict[str, int],
        name_codes: Callable[[TableRows], Int32],
    ) -> None:
        for rows in self._device_rows(table, kind, columns):
            self._add_device(rows, kind, name_codes(rows))

    def _device_rows(
        self, table: str, kind: DeviceKind, columns: dict[str, int], left_out: Int64 | None = None
    ) -> Iterator[TableRows]:
        """The rows with usable times, without those of the correlations to leave out."""
        for batch in self._batches(f"{_CUPTI}{table}", _DEVICE | columns):
            rows = self._timed(batch)
            process = rows["globalPid"] >> 24
            rows = rows.with_column("correlation", self._correlation(rows, process))
            if left_out is not None:
                rows = rows.where(~np.isin(rows["correlation"], left_out))
            if len(rows):
                if kind <= DeviceKind.MEMSET:
                    self._busy.update(_distinct(rows["globalPid"] >> 24).tolist())
                yield rows

    def _batches(
        self, table: str, columns: dict[str, int], text: str | None = None
    ) -> Iterator[TableRows]:
        for batch in self._database.batches(table, columns, self.columns.odd, text=text):
            self.columns.events += len(batch)
            yield batch

    def _add_device(self, rows: TableRows, kind: DeviceKind, name: Int32) -> None:
        # The machine's numbers of the GPUs; a process may see only some, counted from zero.
        device = rows["deviceId"]
        pid = (rows["globalPid"] >> 24) & _MAX_ID

        def numbers(keys: list[int]) -> Int64:
            pairs = ((key >> 24, (key & _MAX_ID) - 1) for key in keys)
            return np.array([self._gpus.get(pair, pair[1]) for pair in pairs], dtype=np.int64)

        self.columns.device.add(
            kind=_repeated(kind, len(rows), np.int8),
            name=name,
            lane=_repeated(ABSENT, len(rows), np.int32),
            device=_int32(_by_distinct(pid << 24 | (device + 1), numbers)),
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
                name=self._string_codes(rows["nameId"], call_name),
                correlation=self._correlation(rows, rows["globalTid"] >> 24),
            )

    def _read_ranges(self) -> None:
        codes = RangeCodes(self.columns)
        for batch in self._batches(_RANGES, _RANGE, text="text"):
            kind, ended = batch["eventType"], batch["end"] != INVALID_NS
            ranged = np.isin(kind, RANGE_TYPES) | ((kind == ABSENT) & ended)
            rows = self._timed(batch.where(ranged))
            if not len(rows):
                continue
            distinct = Codes()
            # A range's text is in its row, or registered once and referred to.
            pairs = zip(rows.texts, rows["textId"].tolist(), strict=True)
            texts = [text or self._strings.get(key) or UNNAMED for text, key in pairs]
            self.unnamed += texts.count(UNNAMED)
            place = distinct.encode(texts)
            parsed = np.array([codes.parse(text) for text in distinct], dtype=np.int64)[place]
            scope = self._scope(rows["globalTid"] >> 24)
            self._add_host(
                rows,
                kind=parsed[:, 0].astype(np.int8),
                name=parsed[:, 1].astype(np.int32),
                shapes=parsed[:, 2].astype(np.int32),
                forward_thread=parsed[:, 3].astype(np.int32),
                sequence=np.where(parsed[:, 4] >= 0, parsed[:, 4] + scope, ABSENT),
            )

    def _add_host(self, rows: TableRows, **columns: NDArray[Any]) -> None:
        absent = _repeated(ABSENT, len(rows), np.int64)
        narrow = _repeated(ABSENT, len(rows), np.int32)
        wide = ("correlation", "sequence")
        codes = ("forward_thread", "shapes", "dtypes", "strides", "concrete", "collective")
        defaults = dict.fromkeys(wide, absent) | dict.fromkeys(codes, narrow)
        self.columns.host.add(
            **{**defaults, **columns},
            thread=self._lane_codes(rows["globalTid"]),
            start_ns=rows["start"],
            dur_ns=rows["end"] - rows["start"],
        )

    def _timed(self, rows: TableRows) -> TableRows:
        """The rows with a usable start and duration; the others are counted."""
        start, end = rows["start"], rows["end"]
        # CUPTI writes zeros if it could not take the time.
        no_start = (start <= -LATEST_NS) | (start >= LATEST_NS) | ((start == 0) & (end == 0))
        no_end = ~no_start & ((end <= -LATEST_NS) | (end >= LATEST_NS))
        dur = np.where(no_start | no_end, 0, end - start)
        losses = {
            "without a usable start": no_start,
            "without an end": no_end,
            "with a negative duration": dur < 0,
            "longer than 100 days": dur > LIMIT_DUR_NS,
        }
        good = np.ones(len(rows), dtype=bool)
        for reason, bad in losses.items():
            self.losses.add_malformed(reason, int(bad.sum()))
            good &= ~bad
        return rows.where(good)

    def _correlation(self, rows: TableRows, process: Int64) -> Int64:
        ids = rows["correlationId"]
        if ABSENT in self._busy:  # old exports do not say which process did the device work
            return ids
        return np.where(ids >= 0, ids + self._scope(process), ABSENT)

    def _scope(self, process: Int64) -> Int64:
        """Every process counts its calls from one: an offset keeps those of several apart."""

        def codes(keys: list[int]) -> Int64:
            return np.array([self._processes[key] if key >= 0 else 0 for key in keys], np.int64)

        return _by_distinct(process, codes) << 32

    def _lane_codes(self, thread: Int64) -> Int32:
        codes = _by_distinct(thread, lambda keys: self.columns.lanes.encode([*map(_lane, keys)]))
        return _narrow(codes)

    def _string_codes(self, ids: Int64, clean: Callable[[str], str] = str) -> Int32:
        def codes(keys: list[int]) -> Int32:
            texts = (self._strings.get(key) for key in keys)
            return self.columns.names.encode(
                [UNNAMED if text is None else clean(text) for text in texts]
            )

        name: Int32 = _by_distinct(ids, codes)
        self.unnamed += int((name == self.columns.names.get(UNNAMED, ABSENT)).sum())
        return name

    def _copy_names(self, rows: TableRows) -> Int32:
        kinds = (rows[column].tolist() for column in ("copyKind", "srcKind", "dstKind"))
        return self._distinct_names(zip(*kinds, strict=True), copy_name)

    def _memset_names(self, rows: TableRows) -> Int32:
        return self._distinct_names(rows["memKind"].tolist(), memset_name)

    def _distinct_names(self, keys: Iterable[Any], make_name: Callable[[Any], str]) -> Int32:
        """A name for every key; `make_name` is called once for each distinct key."""
        distinct = Codes()
        place = distinct.encode(list(keys))
        return self.columns.names.encode([make_name(key) for key in distinct])[place]

    def _grid_codes(self, rows: TableRows) -> Int32:
        x, y, z = rows["gridX"], rows["gridY"], rows["gridZ"]
        whole = (x > 0) & (y > 0) & (z > 0)
        return _by_distinct(np.where(whole, x << 32 | y << 16 | z, ABSENT), self._grid_text_codes)

    def _grid_text_codes(self, keys: list[int]) -> Int32:
        def code(key: int) -> int:
            sides = [key >> 32, key >> 16 & _MAX_GRID_SIDE, key & _MAX_GRID_SIDE]
            return self.columns.texts[str(sides).encode()]

        return np.array([code(key) if key >= 0 else ABSENT for key in keys], dtype=np.int32)


def _repeated(value: int, count: int, dtype: Any) -> NDArray[Any]:
    """A column of one value, which takes no memory."""
    return np.broadcast_to(np.array(value, dtype), count)


def _distinct(values: Int64) -> Int64:
    return values[:1] if (values == values[:1]).all() else links.distinct(values)


def _by_distinct(values: Int64, compute: Callable[[list[int]], NDArray[Any]]) -> NDArray[Any]:
    """`compute` of every value, called only with the distinct ones."""
    distinct = _distinct(values)
    if len(distinct) == 1:
        return np.broadcast_to(compute(distinct.tolist()), len(values))
    return compute(distinct.tolist())[np.searchsorted(distinct, values)]


def _lane(thread: int) -> tuple[int, int]:
    """The process and thread of a serialised global id."""
    if thread < 0:
        return ABSENT, ABSENT
    return (thread >> 24) & _MAX_ID, thread & _MAX_ID


def _int32(values: Int64) -> Int32:
    return _narrow(np.where(values <= np.iinfo(np.int32).max, values, ABSENT))


def _narrow(values: NDArray[Any]) -> Int32:
    if values.strides == (0,):
        return np.broadcast_to(values[:1].astype(np.int32), len(values))
    return values.astype(np.int32)


# Nsight's numbers and texts as names, in the words that Kineto uses for the same events.

UNNAMED = "(unnamed)"
RANGE_TYPES = (59, 60, 70, 71)  # eventType of push/pop and start/end, recorded or imported

# Nsight's own enumerations (ENUM_CUDA_MEMCPY_OPER, ENUM_CUDA_MEM_KIND), which are not CUPTI's.
_COPIES = (
    *("Unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"),
    *("Unified HtoD", "Unified DtoH", "Unified DtoD"),
)
_MEMORIES = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")
_SYNCS = (
    ("WaitEvent", "Stream Wait Event"),
    ("StreamSynchronize", "Stream Sync"),
    ("Event", "Event Sync"),
    ("DeviceSynchronize", "Context Sync"),
    ("CtxSynchronize", "Context Sync"),
)
_API_VERSION = re.compile(r"_v\d{4,}\Z")
_BARE_OPERATOR = re.compile(r"(?:aten|prims|autograd::engine|torch::autograd|_?c10d\w*)::\S")
_BACKWARD = re.compile(r"\w*Backward\d*")


def copy_name(kinds: tuple[int, int, int]) -> str:
    """The name of a copy of this copyKind, srcKind and dstKind."""
    kind, source, target = kinds
    return (
        f"Memcpy {_word(_COPIES, kind)} ({_word(_MEMORIES, source)} -> {_word(_MEMORIES, target)})"
    )


def memset_name(kind: int) -> str:
    return f"Memset ({_word(_MEMORIES, kind)})"


def graph_name(graph: int) -> str:
    return f"CUDA graph {graph}"


def sync_name(call: str) -> str:
    """Named after the call that waits: syncType does not fit its own enumeration (2025.3)."""
    return next((word for part, word in _SYNCS if part in call), "Unknown Sync")


def call_name(name: str) -> str:
    """cudaLaunchKernel_v7000 -> cudaLaunchKernel; cuMemcpyHtoD_v2 stays: the driver says so."""
    return _API_VERSION.sub("", name)


def parse_range(text: str) -> tuple[str, str, str]:
    """Name, sequence number and shapes, as torch.autograd.profiler.emit_nvtx writes them."""
    name, tagged, rest = text.partition(", op_id = ")
    if tagged and rest[:1].isdecimal():
        shapes = rest.partition(", sizes = ")[2].partition(", input_op_ids = ")[0]
    else:
        name, _, shapes = text.partition(", sizes = ")
    name, _, sequence = name.partition(", seq = ")
    if sequence and not (sequence.isdecimal() and len(sequence) < 19):
        return text, "", ""
    return (text, "", "") if shapes and not shapes.startswith("[") else (name, sequence, shapes)


class RangeCodes(dict[tuple[str, bool, str, bool], tuple[int, int, int, int]]):
    """(name, has a sequence number, shapes, has a tail) -> kind, name, shapes and forward thread.

    The texts of operators almost all differ, because of their ids; these keys are few.
    """

    def __init__(self, columns: Collector) -> None:
        super().__init__()
        self._columns = columns

    def parse(self, text: str) -> tuple[int, int, int, int, int]:
        """Kind, name, shapes, forward thread and the sequence number, or -1."""
        name, sequence, shapes = parse_range(text)
        row = self[name, bool(sequence), shapes, len(name) < len(text)]
        return (*row, int(sequence) if sequence else ABSENT)

    def __missing__(self, key: tuple[str, bool, str, bool]) -> tuple[int, int, int, int]:
        name, numbered, shapes, tagged = key
        kind = _kind(name, numbered=numbered, shaped=bool(shapes), tagged=tagged)
        row = self[key] = (
            kind,
            self._columns.names[name],
            self._columns.texts[shapes.encode()] if shapes else ABSENT,
            # The export does not say which thread ran the forward pass.
            1 if numbered and _BACKWARD.fullmatch(name) else ABSENT,
        )
        return row


def _kind(name: str, *, numbered: bool, shaped: bool, tagged: bool) -> HostKind:
    """`record_function` blocks get an id like operators, but no number and no shapes."""
    operator = numbered or shaped or (tagged and "::" in name) or _BARE_OPERATOR.match(name)
    return HostKind.OPERATOR if operator else HostKind.ANNOTATION


def _word(words: tuple[str, ...], key: int) -> str:
    return words[key] if 0 <= key < len(words) else "Unknown"
