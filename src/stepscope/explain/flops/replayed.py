"""Kernels that CUDA graphs replay, joined to the operators that made them.

A replay has no operators. If the trace saw the graph's recording, its launches are in the order of
the replay's kernels. If capture of the run noted the recording's operators, kernels are joined to
them by kind and order where the match is sure. Otherwise a kernel is like one that an operator
launched elsewhere in the trace (an eager warm-up, another step) if name and grid are the same;
where such kernels come from calls with different shapes, these must repeat in the replay's order,
or the operator stays unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.flops.captured_graphs import join_kinds
from stepscope.explain.flops.kernel_names import read_name
from stepscope.explain.graph_replays import find_replayed
from stepscope.explain.work import named, one_of, rows_named
from stepscope.records.trace import ABSENT, DeviceKind, HostKind
from stepscope.trace.links import distinct, nearest_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from stepscope.explain.arrays import Bools, Indices, Int32s
    from stepscope.explain.graph_recordings import GraphRecording
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


def join_replays(
    trace: Trace, known: HostOperators, recordings: Sequence[GraphRecording] = ()
) -> Replays | None:
    """None if the trace has no replay that could be joined."""
    device = trace.device
    wanted = _find_wanted(trace, known)
    if not wanted.any():
        return None
    operator = np.full(len(device), ABSENT, np.int32)
    call_part = np.zeros(len(device))
    _join_recordings(trace, known, wanted, operator, call_part)
    product = _find_products(trace, wanted)
    for rows, of_rows in join_kinds(trace, find_replays(trace, known), recordings):
        if (operator[rows] < 0).all():
            operator[rows] = of_rows
            call_part[rows] = _share_calls(of_rows, product[rows])
    _join_likes(trace, known, wanted & (operator < 0), operator, call_part)
    return Replays(operator=operator, call_part=call_part) if (operator >= 0).any() else None


def _find_wanted(trace: Trace, known: HostOperators) -> Bools:
    """Replayed events; what runs inside a compiled region is that region's."""
    wanted = find_replayed(trace)
    if len(trace.host):
        around = np.maximum(known.operator, 0)
        wanted &= ~((known.operator >= 0) & known.answering[around])
    return wanted


def find_replays(trace: Trace, known: HostOperators) -> list[Indices]:
    """The events of each replay. Captures are told apart by the order of all replays, so those that
    were joined to something else are among them."""
    return list(split_replays(trace, _find_wanted(trace, known)))


def find_unjoined(trace: Trace, known: HostOperators, joined: Bools) -> Bools:
    """The events of replays with a product that was joined to no operator."""
    wanted = _find_wanted(trace, known)
    missing = trace.device.correlation[_find_products(trace, wanted & ~joined)]
    unjoined: Bools = wanted & np.isin(trace.device.correlation, missing)
    return unjoined


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
    for rows in split_replays(trace, wanted):
        if len(distinct(device.stream[rows])) > 1:
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


def split_replays(trace: Trace, wanted: Bools) -> Iterator[Indices]:
    """The events of each replay, in order of their start."""
    rows = np.flatnonzero(wanted)
    rows = rows[np.argsort(trace.device.correlation[rows], kind="stable")]
    if len(rows):
        edges = np.flatnonzero(np.diff(trace.device.correlation[rows])) + 1
        yield from np.split(rows, edges)


def _find_products(trace: Trace, among: Bools) -> Bools:
    """Events of kernels that multiply matrices, by their names."""
    return rows_named(trace, trace.device, among, lambda name: read_name(name).multiplies)


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
    signatures = known.signature[known.operator[examples]]
    places = _by_key(trace, examples)
    for key, rows in _by_key(trace, targets).items():
        likes = examples[places.get(key, _NONE)]
        parts = share[places.get(key, _NONE)]
        same = signatures[places.get(key, _NONE)]
        for replay in np.split(targets[rows], _edges(device.correlation[targets[rows]])):
            order = _match_in_order(same, len(replay))
            if order is not None:
                operator[replay] = known.operator[likes[order]]
                call_part[replay] = parts[order]


_NONE = np.zeros(0, np.intp)


def _by_key(trace: Trace, rows: Indices) -> dict[tuple[int, int], Indices]:
    """Places of the rows with the same name and grid, in order of their start."""
    if not len(rows):
        return {}
    device = trace.device
    keys = np.stack((device.name[rows], device.grid[rows]), axis=1)
    values, which = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(which.reshape(-1), kind="stable")
    groups = np.split(order, _edges(which.reshape(-1)[order]))
    return {(int(name), int(grid)): rows for (name, grid), rows in zip(values, groups, strict=True)}


def _edges(values: NDArray[np.integer]) -> Indices:
    """Where a new value begins; rows of one replay come together only on one device at a time."""
    return np.flatnonzero(np.diff(values)) + 1


def _match_in_order(signatures: NDArray[np.int32], count: int) -> Indices | None:
    """For each of `count` kernels of a replay the place of its like; None if it is not known.

    Likes of one call are all the same. Otherwise a replay repeats the calls of an eager step, so
    they must repeat after as many kernels as the replay has.
    """
    if not len(signatures):
        return None
    if (signatures == signatures[0]).all():
        return np.zeros(count, np.intp)
    periodic = len(signatures) % count == 0
    if not periodic or (signatures[count:] != signatures[:-count]).any():
        return None
    return np.arange(count)
