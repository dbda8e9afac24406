"""The rules that every Trace keeps, and that code after the readers relies on.

A Trace from a cache entry is checked against them: its file may hold anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.records.limits import MAX_EVENT_BYTES, MAX_RANKS
from stepscope.records.trace import ABSENT, DeviceKind, HostKind
from stepscope.trace.column_types import column_types
from stepscope.trace.links import are_sorted
from stepscope.trace.plausible import (
    MAX_ELEMENTS,
    OddValues,
    is_rank_text,
    limit_numbers,
    limit_sizes,
    limit_texts,
    plausible_groups,
)
from stepscope.trace.times import LIMIT_DUR_NS, LIMIT_NS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from stepscope.records.trace import Trace

    Column = NDArray[Any]

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
    """Values that plausible.py would have refused."""
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
