"""CUDA graphs that the script captured: what their replays compute.

The capture was long before the trace. Capture of the run noted its operators, in order, without
their kernels; the trace has the kernels of each replay, without operators. Both are told apart by
their contents, and kinds of replays are joined to kinds of captures by their products: as many of
them, and in the same order. Kernels get their operators where the order is sure. Otherwise the
FLOPs of a capture are given to the graph's launch, divided among the kernels that multiply.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from stepscope.explain.flops.call import Call
from stepscope.explain.flops.compiled import PREFIX
from stepscope.explain.flops.cost import MATMUL_LIKE
from stepscope.explain.flops.dtypes import FP32, dtype_code
from stepscope.explain.flops.kernel_names import is_plain_fp32, read_name
from stepscope.explain.flops.kernel_order import join_by_order
from stepscope.explain.flops.product_order import CapturedCall
from stepscope.explain.flops.signatures import LARGEST, price_call
from stepscope.explain.work import rows_named
from stepscope.records.trace import ABSENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from stepscope.explain.arrays import Bools, Indices, Int8s, Int32s, Int64s
    from stepscope.explain.graph_recordings import GraphRecording
    from stepscope.records.compiled import CapturedOperator
    from stepscope.records.trace import Trace

_CLOSE = math.log(1.5)  # of numbers of products, where the order says which capture it is
_SAME = math.log(1.1)  # where it does not
_COMPLEX = re.compile(r"_cf32|_complex")


class CaptureCost(msgspec.Struct, frozen=True, kw_only=True):
    """One replay of a capture."""

    products: tuple[float, ...]  # FLOPs of each kernel that multiplies, in order
    again: int  # of their sum, what recomputes the forward pass
    dtype: int  # of most of it; code of DTYPES
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


def _call_of(operator: CapturedOperator) -> CapturedCall:
    return CapturedCall(operator.name, _count_products(operator), _kind_of_bias(operator))


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
            [_call_of(one) for one in recording.operators],
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
            _fill_kind(trace, kind, cost, to)
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
    in_order = _match_in_order(counts, sizes)
    if in_order is not None:
        return in_order
    matches: list[int | None] = []
    for count in counts:
        alike = [n for n, size in enumerate(sizes) if count.distance(size) <= _SAME]
        exact = [n for n in alike if not count.distance(sizes[n])] or alike
        flops = {cost.flops for n in exact if (cost := costs[n]) is not None}
        matches.append(exact[0] if len(flops) == 1 else None)
    return matches


def _match_in_order(
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


def _fill_kind(trace: Trace, kind: _ReplayKind, cost: CaptureCost, to: LaunchColumns) -> None:
    """Replays whose launches were not recorded have that of another replay of the kind."""
    for rows, around in zip(kind.products, kind.transforms, strict=True):
        own = trace.device.launch[rows[:1]]
        row = int(own[0]) if len(own) and own[0] >= 0 else kind.launch
        to.flops[row], to.again[row], to.dtype[row] = cost.flops, cost.again, cost.dtype
        to.counted[row] = to.answering[row] = True
        to.operator[rows] = to.operator[around] = row
        names = [read_name(trace.strings[code]) for code in trace.device.name[rows].tolist()]
        as_tf32 = any(name.dtype == "tf32" for name in names)
        fp32 = np.array([is_plain_fp32(name) and not as_tf32 for name in names], np.bool_)
        to.call_part[rows] = _shares(trace.device.dur_ns[rows], fp32, cost)


def _shares(dur_ns: Int64s, fp32: Bools, cost: CaptureCost) -> NDArray[np.float64]:
    """One by one where there are as many kernels as expected, else by their time. Kernels whose
    names say `fp32` share what the capture has in fp32, the others the rest."""
    weights = np.array(cost.products) if len(cost.products) == len(dur_ns) else dur_ns
    if weights is dur_ns and fp32.any() and not fp32.all():
        weights = weights / np.where(fp32, dur_ns[fp32].sum(), dur_ns[~fp32].sum())
        weights *= np.where(fp32, cost.in_fp32, cost.flops - cost.in_fp32)
    total = float(weights.sum())
    return weights / total if total else np.full(len(dur_ns), 1 / max(1, len(dur_ns)))
