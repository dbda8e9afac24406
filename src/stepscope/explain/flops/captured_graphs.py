"""CUDA graphs that the script captured: what their replays compute, and which operator made
each kernel.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.explain.flops.call import (
    FP32,
    MATMUL_LIKE,
    PREFIX,
    Call,
    dtype_code,
    is_plain_fp32,
    read_name,
)
from stepscope.explain.flops.kernel_order import CapturedCall, join_by_order
from stepscope.explain.flops.prices import LARGEST, price_call
from stepscope.records.compiled import CapturedOperator
from stepscope.records.trace import ABSENT, DeviceKind, HostKind, Trace
from stepscope.step.arrays import Bools, Indices, Int8s, Int32s, Int64s
from stepscope.step.cuda_graphs import GraphRecording, find_replayed
from stepscope.step.work import named, one_of, rows_named
from stepscope.trace.links import distinct, nearest_of

# The capture was long before the trace. Capture of the run noted its operators, in order, without
# their kernels; the trace has the kernels of each replay, without operators. Both are told apart by
# their contents, and kinds of replays are joined to kinds of captures by their products: as many of
# them, and in the same order. Kernels get their operators where the order is sure. Otherwise the
# FLOPs of a capture are given to the graph's launch, divided among the kernels that multiply.

_CLOSE = math.log(1.5)  # of numbers of products, where the order says which capture it is
_SAME = math.log(1.1)  # where it does not
_COMPLEX = re.compile(r"_cf32|_complex")


class CaptureCost(msgspec.Struct, frozen=True, kw_only=True):
    """One replay of a capture."""

    products: tuple[float, ...]  # FLOPs of each kernel that multiplies, in order
    again: int  # of their sum, what recomputes the forward pass
    dtype: int  # of most of it; code of PEAKS
    in_fp32: int = 0  # of their sum, what has inputs in fp32

    @property
    def flops(self) -> int:
        return round(sum(self.products))


class LaunchColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of host rows that a graph's launches fill in, and two of device events."""

    flops: Int64s
    again: Int64s
    counted: Bools
    answering: Bools
    dtype: Int8s
    operator: Int32s  # per device event: the launch that stands for its operators
    call_part: NDArray[np.float64]  # per device event: its part of the launch's FLOPs


def price_capture(operators: Iterable[CapturedOperator]) -> CaptureCost | None:
    """None if a product has sizes that are not known."""
    products: list[float] = []
    by_dtype: Counter[int] = Counter()
    again = 0
    for one in operators:
        if one.name not in MATMUL_LIKE:
            continue
        cost = price_call(Call(one.name, one.shapes, one.dtypes, one.concrete))
        if cost.flops < 0:
            return None
        kernels = _count_products(one)
        products += [cost.flops / kernels] * kernels
        by_dtype[dtype_code(one.dtypes)] += cost.flops
        again += cost.again
    if sum(products) >= LARGEST:  # damaged shapes
        return None
    dtype = max(by_dtype, key=by_dtype.__getitem__, default=ABSENT)
    return CaptureCost(
        products=tuple(products), again=again, dtype=dtype, in_fp32=by_dtype.get(FP32, 0)
    )


_CONVOLUTION_BACKWARD, _MASK = "aten::convolution_backward", 10


def _count_products(operator: CapturedOperator) -> int:
    """How many of an operator's kernels multiply. Gradients of a convolution's input and weight are
    computed one after the other."""
    if operator.name not in MATMUL_LIKE:
        return 0
    if operator.name != _CONVOLUTION_BACKWARD or len(operator.concrete) <= _MASK:
        return 1
    input_and_weight = operator.concrete[_MASK].split(",")[:2]
    return max(1, sum("True" in one for one in input_and_weight))


_CONVOLUTIONS = ("aten::convolution", "aten::_convolution")
_BIAS = 2  # place among the inputs of a convolution, and in the mask of its backward


def _kind_of_bias(operator: CapturedOperator) -> str:
    """A kernel of its own adds a convolution's bias, or sums its gradient; "" without one."""
    if operator.name in _CONVOLUTIONS:
        return "add" if len(operator.shapes) > _BIAS and operator.shapes[_BIAS] else ""
    if operator.name != _CONVOLUTION_BACKWARD or len(operator.concrete) <= _MASK:
        return ""
    return "sum" if "True" in "".join(operator.concrete[_MASK].split(",")[_BIAS:]) else ""


def join_kinds(
    trace: Trace, replays: Sequence[Indices], recordings: Sequence[GraphRecording]
) -> Iterator[tuple[Indices, Int32s]]:
    """The events of each replay of a known recording, and the host row of each one's operator."""
    for kind, recording, _ in _match_replays(trace, replays, recordings):
        names = [trace.strings[code] for code in trace.device.name[kind.replays[0]].tolist()]
        places = join_by_order(
            [
                CapturedCall(one.name, _count_products(one), _kind_of_bias(one))
                for one in recording.operators
            ],
            names,
            [_is_library_product(name) for name in names],
        )
        found = np.array(places, np.int64)
        of_rows = np.where(found >= 0, recording.rows[found], ABSENT).astype(np.int32)
        if (found >= 0).any():
            for rows in kind.replays:
                yield rows, of_rows


def fill_replays(
    trace: Trace,
    replays: Iterable[Indices],
    recordings: Sequence[GraphRecording],
    to: LaunchColumns,
    unjoined: Bools,
) -> Bools:
    """Give replays that were joined to nothing else what their captures compute.

    `replays` are the events of each, in order of their start; `unjoined` says which events still
    need something. Returns which events were joined.
    """
    joined = np.zeros(len(trace.device), np.bool_)
    for kind, _, cost in _match_replays(trace, replays, recordings):
        products = np.concatenate(kind.products)
        if unjoined[products].any():
            # Replays whose launches were not recorded have that of another replay of
            # the kind.
            for rows, around in zip(kind.products, kind.transforms, strict=True):
                own = trace.device.launch[rows[:1]]
                row = int(own[0]) if len(own) and own[0] >= 0 else kind.launch
                to.flops[row], to.again[row], to.dtype[row] = cost.flops, cost.again, cost.dtype
                to.counted[row] = to.answering[row] = True
                to.operator[rows] = to.operator[around] = row
                names = [
                    read_name(trace.strings[code]) for code in trace.device.name[rows].tolist()
                ]
                as_tf32 = any(name.dtype == "tf32" for name in names)
                fp32 = np.array([is_plain_fp32(name) and not as_tf32 for name in names], np.bool_)
                to.call_part[rows] = _shares(trace.device.dur_ns[rows], fp32, cost)
            joined[products] = True
            joined[np.concatenate(kind.transforms)] = True
    return joined


class _ReplayKind(NamedTuple):
    """Replays with the same kernels."""

    launch: int  # host row of the first launch that was recorded
    replays: list[Indices]  # the events of each replay, in order
    products: list[Indices]  # those that multiply
    transforms: list[Indices]  # what they multiply, or the result


def _match_replays(
    trace: Trace, replays: Iterable[Indices], recordings: Sequence[GraphRecording]
) -> Iterator[tuple[_ReplayKind, GraphRecording, CaptureCost]]:
    if not recordings:
        return
    every = np.ones(len(trace.device), np.bool_)
    product = rows_named(trace, trace.device, every, _is_library_product)
    transform = rows_named(trace, trace.device, every, lambda name: read_name(name).transforms)
    costs = [price_capture(one.operators) for one in recordings]
    kinds = list(_find_kinds(trace, replays, product, transform))
    matches = _match_kinds([_count_products_of(trace, kind.products[0]) for kind in kinds], costs)
    for kind, number in zip(kinds, matches, strict=True):
        cost = costs[number] if number is not None else None
        if number is not None and cost is not None:
            yield kind, recordings[number], cost


class _Counted(NamedTuple):
    """How many products some kernels compute."""

    fewest: int
    most: int

    def distance(self, size: int | None) -> float:
        """As the logarithm of a ratio; 0 between the two."""
        if size is None or (self.most == 0) != (size == 0):
            return math.inf
        near = min(max(size, self.fewest), self.most)
        return abs(math.log(max(near, 1) / max(size, 1)))


def _count_products_of(trace: Trace, kernels: Indices) -> _Counted:
    """A convolution by FFT may be done in parts, each with the same product of complex numbers: as
    many as there are kernels, or one where they follow each other."""
    names = [trace.strings[code] for code in trace.device.name[kernels].tolist()]
    parts = [one for one, after in pairwise(names) if one == after and _COMPLEX.search(one)]
    return _Counted(len(names) - len(parts), len(names))


def _find_kinds(
    trace: Trace, replays: Iterable[Indices], product: Bools, transform: Bools
) -> Iterator[_ReplayKind]:
    """In the order of their first replay; without one whose launch was recorded, the trace may
    have begun in the middle of it."""
    device = trace.device
    kinds: dict[bytes, list[Indices]] = {}
    for rows in replays:
        names = np.stack((device.name[rows], device.grid[rows]))
        kinds.setdefault(names.tobytes(), []).append(rows)
    for same in kinds.values():
        launches = np.concatenate([device.launch[rows[:1]] for rows in same])
        if (launches >= 0).any():
            launch = int(launches[launches >= 0][0])
            products, transforms = (
                [rows[chosen[rows]] for rows in same] for chosen in (product, transform)
            )
            yield _ReplayKind(launch, same, products, transforms)


def _is_library_product(name: str) -> bool:
    """Products that Inductor wrote itself were no operators when the graph was captured."""
    return read_name(name).multiplies and not name.startswith(PREFIX)


def _match_kinds(
    counts: Sequence[_Counted], costs: Sequence[CaptureCost | None]
) -> list[int | None]:
    """For each kind of replay, by its number of products: the capture, or None.

    A step replays graphs in the order of their captures, so as many kinds are joined in order.
    Otherwise only one capture may have about as many products.
    """
    sizes = [None if cost is None else len(cost.products) for cost in costs]
    in_order = _match_captures_in_order(counts, sizes)
    if in_order is not None:
        return in_order
    matches: list[int | None] = []
    for count in counts:
        alike = [n for n, size in enumerate(sizes) if count.distance(size) <= _SAME]
        exact = [n for n in alike if not count.distance(sizes[n])] or alike
        flops = {cost.flops for n in exact if (cost := costs[n]) is not None}
        matches.append(exact[0] if len(flops) == 1 else None)
    return matches


def _match_captures_in_order(
    counts: Sequence[_Counted], sizes: Sequence[int | None]
) -> list[int | None] | None:
    """As many kinds as captures, each with about as many products. The window may begin in the
    middle of a step: of all first captures, the one that fits best; None if several do."""
    if len(counts) != len(sizes) or not sizes:
        return None
    numbers = list(range(len(sizes)))
    distances: dict[int, float] = {}
    for first in numbers:
        order = numbers[first:] + numbers[:first]
        apart = [count.distance(sizes[n]) for count, n in zip(counts, order, strict=True)]
        if max(apart) <= _CLOSE:
            distances[first] = sum(apart)
    best = [first for first, apart in distances.items() if apart == min(distances.values())]
    if 0 not in best and len(best) != 1:
        return None
    first = 0 if 0 in best else best[0]
    return [*numbers[first:], *numbers[:first]]


def _shares(dur_ns: Int64s, fp32: Bools, cost: CaptureCost) -> NDArray[np.float64]:
    """One by one where there are as many kernels as expected, else by their time. Kernels whose
    names say `fp32` share what the capture has in fp32, the others the rest."""
    weights = np.array(cost.products) if len(cost.products) == len(dur_ns) else dur_ns
    if weights is dur_ns and fp32.any() and not fp32.all():
        weights = weights / np.where(fp32, dur_ns[fp32].sum(), dur_ns[~fp32].sum())
        weights *= np.where(fp32, cost.in_fp32, cost.flops - cost.in_fp32)
    total = float(weights.sum())
    return weights / total if total else np.full(len(dur_ns), 1 / max(1, len(dur_ns)))


# Kernels that CUDA graphs replay, joined to the operators that made them.
#
# A replay has no operators. If the trace saw the graph's recording, its launches are in the order
# of the replay's kernels. If capture of the run noted the recording's operators, kernels are joined
# to them by kind and order where the match is sure. Otherwise a kernel is like one that an operator
# launched elsewhere in the trace (an eager warm-up, another step) if name and grid are the same;
# where such kernels come from calls with different shapes, these must repeat in the replay's order,
# or the operator stays unknown.

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
            order = _match_kernels_in_order(same, len(replay))
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


def _match_kernels_in_order(signatures: NDArray[np.int32], count: int) -> Indices | None:
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
