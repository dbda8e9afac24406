"""Collect decoded events in growing columns, and assemble the columns of any reader into one
linked Trace.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Hashable, Iterable, Sequence
from itertools import compress, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.quality import MAX_RANKS, Note
from stepscope.records.trace import (
    ABSENT,
    CollectiveArgs,
    Columns,
    Device,
    DeviceEvents,
    DeviceKind,
    Flags,
    HostEvents,
    HostKind,
    Int8,
    Int32,
    Int64,
    MemoryEvents,
    Thread,
    Trace,
)
from stepscope.text.figures import percent
from stepscope.text.words import counted
from stepscope.trace import links
from stepscope.trace.formats.events import Args, Event, ExactEvent, Role, classify
from stepscope.trace.formats.plausible_values import (
    INVALID_NS,
    LIMIT_DUR_NS,
    LIMIT_NS,
    MAX_ELEMENTS,
    OddValues,
    column_types,
    durations_to_ns,
    is_rank_text,
    limit_numbers,
    limit_sizes,
    limit_texts,
    microseconds_to_ns,
    text_to_ns,
)

if TYPE_CHECKING:
    from stepscope.trace.formats.decode_events import Losses

# Decoded events -> growing columns. The only place that loops over event objects.

INT8, INT32, INT64 = np.int8, np.int32, np.int64
_LARGEST: dict[type[np.signedinteger[Any]], int] = {
    kind: int(np.iinfo(kind).max) for kind in (INT8, INT32, INT64)
}
_MAX_SIGNATURES = 1 << 16  # remembered: memory must not grow if no two calls are alike
_MAX_CATEGORIES = 1 << 12  # likewise
_FILE_NAMES = {info.name: info.encode_name for info in msgspec.structs.fields(Args)}
# Ways to write "no value"; -1 as an unsigned number is one.
_NO_VALUE = (None, "", ABSENT, str(ABSENT), (1 << 32) - 1, (1 << 64) - 1)
_HEX = re.compile(r"0[xX][0-9a-fA-F]{1,15}")


class Codes(dict[Any, int]):
    """Value -> small number, in the order in which values first occur."""

    def __missing__(self, key: Hashable) -> int:
        code = self[key] = len(self)
        return code

    def encode(self, values: Sequence[Any]) -> Int32:
        return _packed(map(self.__getitem__, values), len(values), INT32)


class _Roles(dict[str, int]):
    """ "phase category" -> Role and kind, in one number."""

    def __missing__(self, key: str) -> int:
        phase, _, category = key.partition(" ")
        role, kind = classify(phase, category)
        if len(self) < _MAX_CATEGORIES:
            self[key] = role * 16 + kind
        return role * 16 + kind


class _Growing:
    """A column that grows: room for more rows than it has, or one value for all of them.

    Joining a list of pieces at the end would need the memory twice.
    """

    def __init__(self, first: NDArray[Any]) -> None:
        self._rows, self._room = len(first), first

    @property
    def values(self) -> NDArray[Any]:
        return self._room[: self._rows]

    def add(self, piece: NDArray[Any]) -> None:
        rows = self._rows + len(piece)
        # Whether all rows, and those of the piece, hold the same value.
        if is_constant(self.values) and is_constant(piece) and self._room[0] == piece[0]:
            self._room = np.broadcast_to(piece[0], rows)
        elif rows > len(self._room) or not self._room.flags.writeable:
            room = np.empty(2 * rows, self._room.dtype)
            room[: self._rows] = self.values
            self._room = room
        if self._room.flags.writeable:
            self._room[self._rows : rows] = piece
        self._rows = rows


class EventTable:
    """Columns that grow piece by piece."""

    def __init__(self) -> None:
        self._columns: dict[str, _Growing] = {}

    def add(self, **columns: NDArray[Any]) -> None:
        for name, values in columns.items():
            if name in self._columns:
                self._columns[name].add(values)
            else:
                self._columns[name] = _Growing(values)

    def column(self, name: str) -> NDArray[Any]:
        """The rows so far."""
        return self._columns[name].values if name in self._columns else np.empty(0, INT64)

    def finish(self, **dtypes: Any) -> Columns:
        columns, self._columns = self._columns, {}
        return {
            name: columns[name].values if name in columns else np.empty(0, dtype)
            for name, dtype in dtypes.items()
        }


def is_constant(column: NDArray[Any]) -> bool:
    """Whether np.broadcast_to made the column: one value for all rows."""
    return bool(len(column)) and column.strides == (0,)


class Collector:
    """Collects decoded events, piece by piece, in columns and tables of distinct values."""

    def __init__(self, losses: Losses, *, launch_flows: bool = False) -> None:
        self.events = 0
        self.rows = 0  # events that say something
        self.names = Codes()
        self.texts = Codes()  # JSON text of shapes, dtypes, grids: bytes
        self.lanes = Codes()  # (pid, tid)
        self.collectives = Codes()
        self.thread_names: dict[tuple[Any, Any], str] = {}
        self.host, self.device, self.memory = EventTable(), EventTable(), EventTable()
        self.launch_flows, self.backward_flows = EventTable(), EventTable()
        self._roles = _Roles()
        self._signatures = Codes()  # shapes, dtypes, strides, plain inputs of a call: one text
        self._signature_texts = np.empty((4, 0), INT32)  # the codes of these, by signature
        self.odd = OddValues()
        self._losses = losses
        # Flows from launch to device event repeat the correlation ids: most files need none.
        self._flow_tables = {Role.BACKWARD_FLOW: self.backward_flows}
        if launch_flows:
            self._flow_tables[Role.LAUNCH_FLOW] = self.launch_flows

    @property
    def categories(self) -> set[str]:
        return {key.partition(" ")[2] for key in self._roles}

    def lacks_correlations(self) -> bool:
        """Whether some device work can only be linked by its flow events."""
        ids, kinds = self.device.column("correlation"), self.device.column("kind")
        return bool(((ids < 0) & (kinds <= DeviceKind.MEMSET)).any())

    def known_rows(self) -> int:
        """Host and device rows of categories that PyTorch writes."""
        known = int((self.host.column("kind") != HostKind.OTHER).sum())
        return known + len(self.device.column("kind"))

    def add(self, events: list[Event] | list[ExactEvent]) -> None:
        """Add events. Raises NeedsTextError, before adding any, if times need the exact decoder."""
        times = [e.ts for e in events]
        exact = bool(events) and isinstance(events[0], ExactEvent)
        start = text_to_ns(times) if exact else microseconds_to_ns(times)
        count = len(events)
        keys = [f"{e.ph} {e.cat}" for e in events]
        codes = _packed(map(self._roles.__getitem__, keys), count, np.int16)
        roles, kinds = codes >> 4, (codes & 15).astype(INT8)
        self.rows += int((roles < Role.METADATA).sum())
        for role, add_rows in (
            (Role.HOST, self._add_host),
            (Role.DEVICE, self._add_device),
            (Role.MEMORY, self._add_memory),
        ):
            chosen = roles == role
            if chosen.any():
                add_rows(list(compress(events, chosen.tobytes())), kinds[chosen], start[chosen])
        for role, table in self._flow_tables.items():
            chosen = roles == role
            if chosen.any():
                self._add_flows(list(compress(events, chosen.tobytes())), start[chosen], table)
        for event in compress(events, (roles == Role.METADATA).tobytes()):
            if event.name == "thread_name":
                self.thread_names[event.pid, event.tid] = str(event.args.name or "")
        self.events += count

    def _times(
        self, events: list[Any], kinds: Int8, start: Int64
    ) -> tuple[list[Any], Int8, Int64, Int64]:
        """Start and duration; events without a usable one are counted and left out."""
        dur = durations_to_ns([e.dur for e in events])
        no_start, no_dur = start == INVALID_NS, dur == INVALID_NS
        negative = ~no_dur & (dur < 0)
        huge = dur > LIMIT_DUR_NS
        bad = no_start | no_dur | negative | huge
        if not bad.any():
            return events, kinds, start, dur
        self._losses.add_malformed("without a usable start", int(no_start.sum()))
        self._losses.add_malformed("without a duration", int((no_dur & ~no_start).sum()))
        self._losses.add_malformed("with a negative duration", int((negative & ~no_start).sum()))
        self._losses.add_malformed("longer than 100 days", int((huge & ~no_start).sum()))
        good = ~bad
        return list(compress(events, good.tobytes())), kinds[good], start[good], dur[good]

    def _add_host(self, events: list[Any], kinds: Int8, start: Int64) -> None:
        rows, kinds, start, dur = self._times(events, kinds, start)
        args = [e.args for e in rows]
        operator = kinds <= HostKind.ANNOTATION
        runtime = kinds == HostKind.RUNTIME
        calls = list(compress(args, runtime.tobytes()))
        operators = list(compress(args, operator.tobytes()))

        def of_operators(values: NDArray[Any]) -> NDArray[Any]:
            return _scatter(operator, values)

        shapes, dtypes, strides, concrete = self._input_codes(operators)
        self.host.add(
            kind=kinds,
            name=self.names.encode([e.name for e in rows]),
            thread=self._lane_codes(rows),
            start_ns=start,
            dur_ns=dur,
            correlation=_scatter(runtime, self._whole("correlation", calls)),
            sequence=of_operators(self._whole("sequence", operators)),
            forward_thread=of_operators(self._whole("forward_thread", operators, INT32)),
            shapes=of_operators(shapes),
            dtypes=of_operators(dtypes),
            strides=of_operators(strides),
            concrete=of_operators(concrete),
            collective=of_operators(self._collective_codes(operators)),
        )

    def _add_device(self, events: list[Any], kinds: Int8, start: Int64) -> None:
        rows, kinds, start, dur = self._times(events, kinds, start)
        args = [e.args for e in rows]
        device = self._whole("device", args, INT32)
        stream = self._whole("stream", args, INT32)
        no_device, no_stream = device == ABSENT, stream == ABSENT
        if no_device.any():
            device[no_device] = _whole([e.pid for e in compress(rows, no_device.tobytes())], INT32)
        if no_stream.any():
            stream[no_stream] = _whole([e.tid for e in compress(rows, no_stream.tobytes())], INT32)
        self.device.add(
            kind=kinds,
            name=self.names.encode([e.name for e in rows]),
            lane=self._lane_codes(rows),
            device=device,
            stream=stream,
            start_ns=start,
            dur_ns=dur,
            correlation=self._whole("correlation", args),
            size_bytes=self._whole("size_bytes", args),
            grid=self._text_codes(_texts([a.grid for a in args])),
            graph_node=self._whole("graph_node", args),
            collective=self._collective_codes(args),
        )

    def _add_memory(self, events: list[Any], _kinds: Int8, time: Int64) -> None:
        # A failed allocation is an instant of the same category, but moved no bytes.
        moved = np.array([e.name == "[memory]" for e in events])
        timed = time != INVALID_NS
        self._losses.add_malformed("without a usable start", int((moved & ~timed).sum()))
        good = moved & timed
        rows = list(compress(events, good.tobytes()))
        args = [e.args for e in rows]
        self.memory.add(
            time_ns=time[good],
            thread=self._lane_codes(rows),
            size_bytes=self._whole("memory_bytes", args),
            address=self._whole("address", args),
            allocated_bytes=self._whole("allocated", args),
            reserved_bytes=self._whole("reserved", args),
            device_type=self._whole("memory_device_type", args, INT32),
            device=self._whole("memory_device", args, INT32),
        )

    def _add_flows(self, events: list[Any], time: Int64, table: EventTable) -> None:
        good = time != INVALID_NS
        rows = list(compress(events, good.tobytes()))
        # Whole numbers, also those that Chrome's format writes as "0x1f".
        values = [e.id for e in rows]
        ids: Int64 = _whole(values)
        for row in np.flatnonzero(ids == ABSENT).tolist():
            if isinstance(values[row], str) and _HEX.fullmatch(values[row]):
                ids[row] = int(values[row], 16)
        table.add(
            begins=np.array([e.ph == "s" for e in rows], dtype=bool),
            id=ids,
            lane=self._lane_codes(rows),
            time_ns=time[good],
        )

    def _lane_codes(self, events: list[Any]) -> Int32:
        keys = zip([e.pid for e in events], [e.tid for e in events], strict=True)
        return _packed(map(self.lanes.__getitem__, keys), len(events), INT32)

    def _input_codes(self, args: Sequence[Args]) -> Int32:
        """Four rows: shapes, dtypes, strides, concrete inputs. The same few calls come again and
        again: all four are looked up together, and one by one only the first time."""
        if len(self._signatures) > _MAX_SIGNATURES:
            self._signatures.clear()
            self._signature_texts = self._signature_texts[:, :0]
        known = len(self._signatures)
        # No JSON holds a NUL.
        inputs = [b"\0".join((a.shapes, a.dtypes, a.strides, a.concrete)) for a in args]
        signatures = self._signatures.encode(inputs)
        if new := len(self._signatures) - known:
            latest = [*islice(reversed(self._signatures), new)][::-1]
            texts = zip(*(signature.split(b"\0") for signature in latest), strict=True)
            codes = np.stack([self._text_codes(column) for column in texts])
            self._signature_texts = np.concatenate((self._signature_texts, codes), axis=1)
        return self._signature_texts.take(signatures, axis=1)

    def _text_codes(self, texts: Sequence[bytes]) -> Int32:
        codes = self.texts.encode(texts)
        absent = self.texts.get(b"")
        if absent is not None:
            codes[codes == absent] = ABSENT
        return codes

    def _collective_codes(self, args: Sequence[Args]) -> Int32:
        codes = np.full(len(args), ABSENT, dtype=INT32)
        for row in [row for row, arg in enumerate(args) if arg.collective is not None]:
            codes[row] = self.collectives[_collective(args[row], self.odd)]
        return codes

    def _whole(
        self, field: str, args: Sequence[Args], dtype: type[np.signedinteger[Any]] = INT64
    ) -> NDArray[Any]:
        """One argument of every event; values that are not whole numbers are counted."""
        values = [*map(attrgetter(field), args)]
        try:
            return _packed(values, len(values), dtype)
        except struct.error:
            numbers = np.array([_whole_or_absent(value, dtype) for value in values], dtype=dtype)
        lost = [
            value for value in compress(values, (numbers == ABSENT).tobytes()) if _is_written(value)
        ]
        if lost:
            self.odd.add(_FILE_NAMES[field], len(lost), lost[0])
        return numbers


def _texts(raws: Sequence[msgspec.Raw]) -> list[bytes]:
    """Faster than bytes() of each one. JSON never holds a NUL."""
    return b"\0".join(raws).split(b"\0") if raws else []


def _scatter(where: Flags, values: NDArray[Any]) -> NDArray[Any]:
    if len(values) == len(where):
        return values
    out = np.full(len(where), ABSENT, dtype=values.dtype)
    out[where] = values
    return out


def _packed(values: Iterable[int], count: int, dtype: type[np.signedinteger[Any]]) -> NDArray[Any]:
    """A column of whole numbers that fit, in half the time of np.fromiter."""
    column = np.empty(count, dtype)
    struct.pack_into(f"{count}{column.dtype.char}", column.data, 0, *values)
    return column


def _whole(values: list[Any], dtype: type[np.signedinteger[Any]] = INT64) -> NDArray[Any]:
    """A column of whole numbers, also from numeric text; anything else is absent."""
    try:
        return _packed(values, len(values), dtype)
    except struct.error:
        return np.array([_whole_or_absent(value, dtype) for value in values], dtype=dtype)


def _whole_or_absent(value: Any, dtype: type[np.signedinteger[Any]]) -> int:
    try:
        number = int(value)
    except (ValueError, TypeError, OverflowError):
        return ABSENT
    return number if abs(number) <= _LARGEST[dtype] else ABSENT


def _is_written(value: Any) -> bool:
    """Whether the writer gave a value at all."""
    return value not in _NO_VALUE


def _collective(args: Args, odd: OddValues) -> CollectiveArgs:
    def whole(field: str, limit: int) -> int:
        value = getattr(args, field)
        number = _whole_or_absent(value, INT64)
        if number > limit or number < ABSENT or (number == ABSENT and _is_written(value)):
            odd.add(_FILE_NAMES[field], 1, value, _text(args.collective))
            return ABSENT
        return number

    return CollectiveArgs(
        name=_text(args.collective),
        in_elements=whole("in_elements", MAX_ELEMENTS),
        out_elements=whole("out_elements", MAX_ELEMENTS),
        dtype=_text(args.dtype),
        group=_text(args.group),
        group_description=_text(args.group_description),
        group_size=whole("group_size", MAX_RANKS),
        group_ranks=_rank_text(args, odd),
        in_split=_text(args.in_split),
        out_split=_text(args.out_split),
        source_rank=whole("source_rank", MAX_RANKS),
        destination_rank=whole("destination_rank", MAX_RANKS),
        sequence=whole("collective_sequence", _LARGEST[INT64]),
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _rank_text(args: Args, odd: OddValues) -> str:
    text = _text(args.group_ranks)
    if is_rank_text(text):
        return text
    odd.add(_FILE_NAMES["group_ranks"], 1, text, _text(args.collective))
    return ""


# Columns of any reader -> one linked Trace: sort, link, make times absolute, note what is odd.

_TABLES = {"host": HostEvents, "device": DeviceEvents, "memory": MemoryEvents}
_LINKS = ("parent", "forward_of", "launch")  # columns that no reader fills
_FLOWS = {"begins": np.bool_, "id": np.int64, "lane": np.int32, "time_ns": np.int64}


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace file says about itself."""

    kind: str
    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None
    groups: tuple[dict[str, Any], ...] = ()
    devices: tuple[Device, ...] = ()
    base_ns: int = 0
    others: dict[str, Any]


def assemble(
    *, path: str, source: str, columns: Collector, facts: Facts, quality: tuple[Note, ...]
) -> Trace:
    """Sort, link and freeze."""
    tables = _plausible(columns)
    host, device, memory = tables["host"], tables["device"], tables["memory"]
    host = _sorted(host, links.host_order(host))
    start, dur = device["start_ns"], device["dur_ns"]
    device = _sorted(device, None if links.are_sorted(start, dur) else np.lexsort((dur, start)))
    # Events at the same instant stay in the file's order.
    memory = _sorted(memory, np.argsort(memory["time_ns"], kind="stable"))
    launch = _launches(host, device, columns.launch_flows.finish(**_FLOWS))
    forward_of = links.find_forwards(host, columns.backward_flows.finish(**_FLOWS))
    parent = links.find_parents(host["thread"], host["start_ns"], host["start_ns"] + host["dur_ns"])
    notes = [*quality, *columns.odd.notes()]
    _shift_all((host, device, memory), facts.base_ns, notes)
    threads = _number_threads(columns, host, memory)
    strings = _number_texts(columns, host, device)
    device.pop("lane")
    _note_unlinked(device, launch, notes)
    return Trace(
        path=path,
        format=source,
        kind=facts.kind,
        rank=facts.rank,
        world_size=facts.world_size,
        backend=facts.backend,
        groups=facts.groups,
        devices=facts.devices,
        facts=facts.others,
        events=columns.events,
        strings=strings,
        threads=threads,
        collectives=tuple(columns.collectives),
        host=HostEvents(**_frozen(host | {"parent": parent, "forward_of": forward_of})),
        device=DeviceEvents(**_frozen(device | {"launch": launch})),
        memory=MemoryEvents(**_frozen(memory)),
        quality=tuple(notes),
    )


def _plausible(columns: Collector) -> dict[str, Columns]:
    """All tables, without values that cannot be true."""
    tables = {}
    texts, names = list(columns.texts), list(columns.names)
    for name, record in _TABLES.items():
        types = {key: dtype for key, dtype in column_types(record).items() if key not in _LINKS}
        lane = {"lane": np.int32} if name == "device" else {}  # which flow events name
        table = tables[name] = getattr(columns, name).finish(**types, **lane)
        limit_numbers(name, table, columns.odd)
        limit_texts(table, texts, names, columns.odd)
    limit_sizes(tables["memory"], columns.odd)
    return tables


def _frozen(columns: Columns) -> Columns:
    """Read-only, like the columns of a cached trace: writing to one fails at once."""
    for values in columns.values():
        values.flags.writeable = False
    return columns


def _sorted(columns: Columns, order: NDArray[np.intp] | None) -> Columns:
    """None: the rows are sorted already."""
    if order is not None:
        for name, column in columns.items():
            columns[name] = column if is_constant(column) else column.take(order)
    return columns


def _launches(host: Columns, device: Columns, flows: Columns) -> Int32:
    launch = links.find_launches(host, device["correlation"])
    if (launch < 0).any() and len(flows["id"]) and (device["correlation"] < 0).any():
        by_flow = links.launches_by_flow(host, device, flows)
        launch = np.where(launch < 0, by_flow, launch)
    return launch


def _shift_all(tables: tuple[Columns, ...], base_ns: int, notes: list[Note]) -> None:
    """Relative -> absolute times, unless these would be out of range."""
    times = [(table, key) for table in tables for key in ("start_ns", "time_ns") if key in table]
    largest = max((int(np.abs(t[k]).max(initial=0)) for t, k in times), default=0)
    if not base_ns:
        return
    if largest + abs(base_ns) >= LIMIT_NS:
        notes.append(
            Note(
                id="base-ignored",
                detail=f"baseTimeNanoseconds {base_ns} does not fit the events' times; "
                "times are relative",
            )
        )
        return
    for table, key in times:
        table[key] += base_ns


def _number_threads(columns: Collector, host: Columns, memory: Columns) -> tuple[Thread, ...]:
    """Keep only lanes that host events use, numbered from zero in sorted order."""
    lanes = list(columns.lanes)
    used = links.distinct(np.concatenate((host["thread"], memory["thread"])))
    renumber = np.full(len(lanes), ABSENT, dtype=np.int32)
    renumber[used] = np.arange(len(used), dtype=np.int32)
    host["thread"] = renumber.take(host["thread"])
    memory["thread"] = renumber.take(memory["thread"])
    return tuple(
        Thread(pid=str(lane[0]), tid=str(lane[1]), name=columns.thread_names.get(lane, ""))
        for lane in map(lanes.__getitem__, used.tolist())
    )


def _number_texts(columns: Collector, host: Columns, device: Columns) -> tuple[str, ...]:
    """One table of strings: the names, then the texts of arguments."""
    shift = len(columns.names)
    for table, keys in ((host, ("shapes", "dtypes", "strides", "concrete")), (device, ("grid",))):
        for key in keys:
            if not is_constant(table[key]) or table[key][0] >= 0:
                table[key] = np.where(table[key] >= 0, table[key] + shift, ABSENT).astype(np.int32)
    texts = (text.decode("utf-8", "replace") for text in columns.texts)
    return (*columns.names, *texts)


def _note_unlinked(device: Columns, launch: Int32, notes: list[Note]) -> None:
    work = device["kind"] <= DeviceKind.MEMSET
    unlinked = work & (launch < 0)
    if unlinked.any():
        share = device["dur_ns"][unlinked].sum() / max(1, device["dur_ns"][work].sum())
        notes.append(
            Note(
                id="unlinked",
                detail=f"no launch was recorded for {int(unlinked.sum()):,} of "
                f"{counted(int(work.sum()), 'device event')} ({percent(share)} of device time), "
                "usually because they were launched before the window. They count as work",
                count=int(unlinked.sum()),
            )
        )
