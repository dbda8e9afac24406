"""Columns of any reader -> one linked Trace: sort, link, make times absolute, note what is odd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.records.figures import percent
from stepscope.records.quality import Note
from stepscope.records.trace import (
    ABSENT,
    DeviceEvents,
    DeviceKind,
    HostEvents,
    MemoryEvents,
    Thread,
    Trace,
)
from stepscope.records.words import counted
from stepscope.trace import links
from stepscope.trace.column_types import column_types
from stepscope.trace.columns import is_constant
from stepscope.trace.plausible import limit_numbers, limit_sizes, limit_texts
from stepscope.trace.times import LIMIT_NS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.trace import Columns, Device, Int32
    from stepscope.trace.columns import Collector


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
    device = _sorted(device, _device_order(device))
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


def _device_order(columns: Columns) -> NDArray[np.intp] | None:
    start, dur = columns["start_ns"], columns["dur_ns"]
    return None if links.are_sorted(start, dur) else np.lexsort((dur, start))


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
