"""Kernels that CUDA graphs replay, joined to the operators that made them.

A replay has no operators. If the trace saw the graph's recording, its launches are in the order of
the replay's kernels. Otherwise a kernel is like one that an operator launched elsewhere in the
trace (an eager warm-up, another step) if name and grid are the same; where such kernels come from
calls with different shapes, the operator stays unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.flops.kernel_names import read_name
from stepscope.explain.graph_replays import find_replayed
from stepscope.explain.work import named, one_of, rows_named
from stepscope.records.trace import ABSENT, DeviceKind, HostKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from stepscope.explain.arrays import Bools, Indices, Int32s
    from stepscope.records.trace import Trace

_BEGINS, _ENDS = one_of("streambegincapture"), one_of("streamendcapture")
_COPIES, _SETS = one_of("memcpy"), one_of("memset")
_LAUNCHES = one_of("launchkernel launchcooperativekernel memcpyasync memsetasync memcpy2dasync")
_CODES = {DeviceKind.KERNEL: 0, DeviceKind.MEMCPY: 1, DeviceKind.MEMSET: 2}


class Replays(msgspec.Struct, frozen=True, kw_only=True):
    """Per device event."""

    operator: NDArray[np.int32]  # host row of the operator, or -1
    call_part: NDArray[np.float64]  # the part of one call of it that the event stands for


class HostOperators(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about operators before replays are joined."""

    is_operator: Bools
    answering: Bools
    signature: NDArray[np.int32]
    operator: Int32s  # per device event


def join_replays(trace: Trace, known: HostOperators) -> Replays | None:
    """None if the trace has no replay that could be joined."""
    device = trace.device
    wanted = find_replayed(trace)
    if not wanted.any():
        return None
    # What runs inside a compiled region is that region's.
    around = np.maximum(known.operator, 0)
    wanted &= ~((known.operator >= 0) & known.answering[around]) if len(trace.host) else wanted
    operator = np.full(len(device), ABSENT, np.int32)
    call_part = np.zeros(len(device))
    _join_recordings(trace, known, wanted, operator, call_part)
    _join_likes(trace, known, wanted & (operator < 0), operator, call_part)
    return Replays(operator=operator, call_part=call_part) if (operator >= 0).any() else None


def _join_recordings(
    trace: Trace,
    known: HostOperators,
    wanted: Bools,
    operator: Int32s,
    call_part: NDArray[np.float64],
) -> None:
    """By order: a replay on one stream with as many events, of the same kinds, as were recorded."""
    recordings = list(_find_recordings(trace))
    if not recordings:
        return
    device = trace.device
    product = _find_products(trace, wanted)
    for rows in _split_replays(trace, wanted):
        if len(np.unique(device.stream[rows])) > 1:
            continue
        kinds = np.array([_CODES.get(DeviceKind(kind), 0) for kind in device.kind[rows].tolist()])
        for launches, recorded in recordings:
            if np.array_equal(kinds, recorded):
                of_rows = nearest_of(trace.host, known.answering, launches)
                lost = of_rows < 0
                of_rows[lost] = nearest_of(trace.host, known.is_operator, launches[lost])
                operator[rows] = of_rows
                call_part[rows] = _share_calls(of_rows, product[rows])
                break


def _find_recordings(trace: Trace) -> Iterator[tuple[Indices, NDArray[np.int64]]]:
    """Of each recording the host rows of its launches in order, and the kind of each."""
    host = trace.host
    runtime = host.kind == HostKind.RUNTIME
    begins = np.flatnonzero(rows_named(trace, host, runtime, _BEGINS))
    ends = np.sort(host.start_ns[rows_named(trace, host, runtime, _ENDS)])
    if not len(begins) or not len(ends):
        return
    launching = rows_named(trace, host, runtime, _LAUNCHES)
    linked = trace.device.launch[trace.device.launch >= 0]
    launching[linked] = False  # these ran at once
    rows = np.flatnonzero(launching)
    rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
    kinds = np.zeros(len(rows), np.int64)
    every = np.ones(len(rows), np.bool_)
    kinds[named(trace, host.name[rows], every, _COPIES)] = _CODES[DeviceKind.MEMCPY]
    kinds[named(trace, host.name[rows], every, _SETS)] = _CODES[DeviceKind.MEMSET]
    start = host.start_ns[rows]
    for begin in np.sort(host.start_ns[begins]).tolist():
        place = int(np.searchsorted(ends, begin))
        if place < len(ends):
            inside = slice(*np.searchsorted(start, (begin, ends[place])).tolist())
            yield rows[inside], kinds[inside]


def _split_replays(trace: Trace, wanted: Bools) -> Iterator[Indices]:
    """The events of each replay, in order of their start."""
    rows = np.flatnonzero(wanted)
    rows = rows[np.argsort(trace.device.correlation[rows], kind="stable")]
    if len(rows):
        edges = np.flatnonzero(np.diff(trace.device.correlation[rows])) + 1
        yield from np.split(rows, edges)


def _find_products(trace: Trace, among: Bools) -> Bools:
    """Events of kernels that multiply matrices, by their names."""
    return rows_named(trace, trace.device, among, lambda name: read_name(name).product)


def _share_calls(of_rows: Int32s, product: Bools) -> NDArray[np.float64]:
    """Divide each operator's call among its events: among its products, where it has some."""
    known = of_rows >= 0
    at = np.where(known, of_rows, 0)
    size = int(at.max(initial=0)) + 1
    events = np.bincount(at[known], minlength=size)
    products = np.bincount(at[known & product], minlength=size)
    has = products[at] > 0
    share = np.where(has, product / np.maximum(products[at], 1), 1 / np.maximum(events[at], 1))
    return np.where(known, share, 0.0)


def _join_likes(
    trace: Trace,
    known: HostOperators,
    wanted: Bools,
    operator: Int32s,
    call_part: NDArray[np.float64],
) -> None:
    """By name and grid, from kernels whose operators have known shapes."""
    device = trace.device
    own = (known.operator >= 0) & ~find_replayed(trace) & (device.kind == DeviceKind.KERNEL)
    own &= device.grid >= 0
    if not own.any() or not wanted.any():
        return
    own[own] = known.signature[known.operator[own]] >= 0
    examples, targets = np.flatnonzero(own), np.flatnonzero(wanted & (device.grid >= 0))
    share = _share_calls(known.operator[examples], _find_products(trace, own)[examples])
    of_key: dict[tuple[int, int], int | None] = {}
    keys = zip(device.name[examples].tolist(), device.grid[examples].tolist(), strict=True)
    signatures = known.signature[known.operator[examples]]
    for place, key in enumerate(keys):
        before = of_key.setdefault(key, place)
        if before is not None and signatures[before] != signatures[place]:
            of_key[key] = None
    keys = zip(device.name[targets].tolist(), device.grid[targets].tolist(), strict=True)
    for target, key in zip(targets.tolist(), keys, strict=True):
        example = of_key.get(key)
        if example is not None:
            operator[target] = known.operator[examples[example]]
            call_part[target] = share[example]
