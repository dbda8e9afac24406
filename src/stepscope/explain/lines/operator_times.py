"""How long operators take, as a trace with marked lines shows: by name and shapes, or by likeness.

An operator that was measured with other shapes is scaled by its FLOPs, where it multiplies, else by
the bytes of its inputs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np

from stepscope.explain.call_tree import group, sum_by
from stepscope.explain.device_time import sum_device_time
from stepscope.explain.flops.call import ITEM_BYTES
from stepscope.explain.lines.divide import divide_time
from stepscope.explain.lines.marks import find_lines, nest
from stepscope.explain.quantiles import median
from stepscope.explain.steps import find_steps, step_of
from stepscope.explain.work import find_work

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stepscope.records.trace import Trace

Shapes = tuple[tuple[int, ...], ...]
Basis = Literal["measured", "scaled", "guessed"]
_FALLBACK_BYTES = 4
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "addbmm")
_CONVOLUTIONS = ("convolution", "_convolution", "convolution_backward", "mkldnn_convolution")


class LineOperatorTime(NamedTuple):
    """Milliseconds of one call, and where they come from."""

    ms: float
    basis: Basis


class _Measured(NamedTuple):
    work: float
    ms: float


class OperatorTimes:
    """Times of single calls on the machine that was measured."""

    def __init__(self, exact: dict[tuple[str, Shapes, str], float]) -> None:
        self._exact = exact
        self._by_name: dict[tuple[str, str], list[_Measured]] = {}
        rates: dict[bool, list[float]] = {True: [], False: []}
        for (name, shapes, dtype), ms in exact.items():
            size = work_of(name, shapes, dtype)
            if size > 0 and ms > 0:
                self._by_name.setdefault((name, dtype), []).append(_Measured(size, ms))
                rates[_multiplies(name)].append(ms / size)
        self._rate = {kind: median(np.array(seen)) if seen else 0.0 for kind, seen in rates.items()}

    def __len__(self) -> int:
        return len(self._exact)

    def of(self, name: str, shapes: Shapes, dtype: str) -> LineOperatorTime:
        """One call's time; shapes of scalars are left out."""
        ms = self._exact.get((name, shapes, dtype))
        if ms is not None:
            return LineOperatorTime(ms, "measured")
        size = work_of(name, shapes, dtype)
        like = self._by_name.get((name, dtype)) or [
            one for (known, _), rows in self._by_name.items() if known == name for one in rows
        ]
        if like and size > 0:
            near = min(like, key=lambda one: abs(math.log(one.work / size)))
            return LineOperatorTime(near.ms * size / near.work, "scaled")
        return LineOperatorTime(self._rate[_multiplies(name)] * size, "guessed")


def operator_times(trace: Trace, step_ms: float) -> OperatorTimes:
    """From the marked steps, scaled to a step of `step_ms` as their lines are."""
    trace = nest(trace)
    host, work = trace.host, find_work(trace)
    lines, steps = find_lines(trace), find_steps(trace, work)
    divided = divide_time(trace, lines, work, steps)
    if not divided.total_ns:
        return OperatorTimes({})
    scale = step_ms * divided.steps / divided.total_ns
    inside = lines.operator & (step_of(steps.steps, host.start_ns) >= 0)
    rows = np.flatnonzero(inside)
    took = host.dur_ns if work.on_host else sum_device_time(trace, work).inclusive
    first, inverse, count = group(host.name[rows], host.shapes[rows], host.dtypes[rows])
    mean = sum_by(inverse, took[rows], count) / np.bincount(inverse, minlength=count) * scale
    exact: dict[tuple[str, Shapes, str], float] = {}
    for place, row in enumerate(rows[first].tolist()):
        shapes = _decode(trace, int(host.shapes[row]))
        dtypes = _decode(trace, int(host.dtypes[row]))
        key = (trace.strings[host.name[row]], tensor_shapes(shapes), _first_dtype(dtypes))
        exact.setdefault(key, float(mean[place]))
    return OperatorTimes(exact)


def tensor_shapes(value: object) -> Shapes:
    """Shapes of all tensors in order, lists opened; scalars and empty places left out."""
    return tuple(_shapes_in(value))


def _shapes_in(value: object) -> Iterator[tuple[int, ...]]:
    if not isinstance(value, list) or not value:
        return
    if all(isinstance(part, int) for part in value):
        yield tuple(value)
        return
    for part in value:
        yield from _shapes_in(part)


def work_of(name: str, shapes: Shapes, dtype: str) -> float:
    """FLOPs of products and convolutions, up to a factor; else bytes."""
    short = name.rpartition("::")[2]
    if short in _PRODUCTS and (product := _product(shapes)):
        return product
    if short in _CONVOLUTIONS and len(shapes) > 1:
        filters = shapes[2] if short == "convolution_backward" and len(shapes) > 2 else shapes[1]
        return 2.0 * math.prod(shapes[0]) * math.prod(filters) / max(1, filters[0])
    item = ITEM_BYTES.get(dtype, _FALLBACK_BYTES)
    return float(item * sum(math.prod(shape) for shape in shapes))


def _product(shapes: Shapes) -> float:
    """The last two matrices are multiplied; a bias may come first or last."""
    matrices = [shape for shape in shapes if len(shape) >= 2]
    if len(matrices) < 2:
        return 0.0
    left, right = matrices[-2:]
    return 2.0 * math.prod(left) * right[-1 if left[-1] == right[-2] else -2]


def _multiplies(name: str) -> bool:
    return name.rpartition("::")[2] in (*_PRODUCTS, *_CONVOLUTIONS)


def _first_dtype(dtypes: object) -> str:
    known: Iterable[object] = dtypes if isinstance(dtypes, list) else ()
    return next((text for text in known if isinstance(text, str) and text in ITEM_BYTES), "")


def _decode(trace: Trace, code: int) -> object:
    if code < 0:
        return None
    try:
        return msgspec.json.decode(trace.strings[code])
    except msgspec.DecodeError:
        return None


def first_dtype(dtypes: Sequence[str]) -> str:
    """The one that an operator is looked up by."""
    return _first_dtype(list(dtypes))
