"""From a trace with marked lines to the cost of each line: which events belong to it, its
share of the steps' time, its operators and kernels, and how long operators take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from stepscope.errors import NotCapturedError
from stepscope.explain.host_calls import place_of, sum_device_time
from stepscope.records.dtypes import PROFILER_BYTES
from stepscope.records.explanation import Steps
from stepscope.records.normal import median
from stepscope.records.source_lines import LineCost, LineCosts, LineKernel, LineOperator
from stepscope.records.trace import ABSENT, HostKind, Trace
from stepscope.step.arrays import Bools, Indices, Int32s, Int64s
from stepscope.step.call_tree import children_sum, decode_list, group, sum_by
from stepscope.step.phases import in_optimizer
from stepscope.step.steps import find_steps, step_of
from stepscope.step.work import DATA_LOADING, Work, find_work, launches_of, rows_named
from stepscope.trace.links import distinct, find_parents, nearest_of

# The times of the marked steps are scaled to the step as it is without the profiler.

KeptBytes = dict[tuple[str, int], int]  # for backward, by file and line


class _Details(NamedTuple):
    """By the code of the mark's name."""

    calls: Mapping[int, float]
    operators: Mapping[int, tuple[LineOperator, ...]]
    kernels: Mapping[int, tuple[LineKernel, ...]]


def cost_lines(trace: Trace, step_ms: float, kept: KeptBytes | None = None) -> LineCosts:
    """The cost of every line in a step of `step_ms`; `kept` is None where it was not captured.

    Raises NotCapturedError for a trace whose lines were not marked.
    """
    trace = nest(trace)
    lines, work = find_lines(trace), find_work(trace)
    steps = find_steps(trace, work)
    if not lines.is_mark.any() or not steps.steps:
        raise NotCapturedError(
            f"{trace.path} does not show lines of code: record with `stepscope run --lines`"
        )
    divided = divide_time(trace, lines, work, steps)
    if not divided.total_ns:
        raise NotCapturedError(f"{trace.path} holds no work in its marked steps")
    scale = step_ms / divided.total_ns
    details = _Details(
        calls=count_calls(trace, lines, steps),
        operators=list_line_operators(trace, lines, work, steps, scale),
        kernels=list_line_kernels(trace, lines, work, steps, scale),
    )
    costs = _costs(trace, divided, scale, details)
    joined = sorted(_joined(costs).values(), key=lambda cost: -cost.total_ms)
    finished = tuple(_finish(cost, step_ms, kept) for cost in joined)
    return LineCosts(
        lines=finished,
        step_ms=step_ms,
        other_ms=step_ms - sum(cost.total_ms for cost in finished),
        device=trace.device_name or trace.kind,
    )


def _costs(
    trace: Trace, divided: DividedTime, scale: float, details: _Details
) -> Iterator[LineCost]:
    for code, amounts in _sum_phases(divided).items():
        place = place_of(trace.strings[code].removeprefix(MARK).removeprefix(RUNNING))
        if place is None:
            continue
        forward, backward, optimizer, other = (amounts * scale).tolist()
        yield LineCost(
            file=place.file,
            line=place.line,
            function=place.function,
            forward_ms=forward,
            backward_ms=backward,
            optimizer_ms=optimizer,
            other_ms=other,
            calls=details.calls.get(code),
            operators=details.operators.get(code, ()),
            kernels=details.kernels.get(code, ()),
        )


def _sum_phases(divided: DividedTime) -> dict[int, NDArray[np.float64]]:
    """Nanoseconds of each phase, by the line's code."""
    rows = np.flatnonzero(divided.line >= 0)
    first, inverse, count = group(divided.line[rows])
    phases = len(LinePhase)
    place = inverse * phases + divided.phase[rows]
    sums = np.bincount(place, divided.dur_ns[rows], count * phases).reshape(count, phases)
    return dict(zip(divided.line[rows[first]].tolist(), sums, strict=True))


def _joined(costs: Iterator[LineCost]) -> dict[tuple[str, int], LineCost]:
    """One cost for each line: a comprehension or a lambda is a function of its own there."""
    joined: dict[tuple[str, int], LineCost] = {}
    for cost in costs:
        known = joined.get(cost.place)
        joined[cost.place] = cost if known is None else _add(known, cost)
    return joined


def _add(a: LineCost, b: LineCost) -> LineCost:
    outer, inner = (a, b) if b.function.startswith("<") else (b, a)
    calls = outer.calls if outer.calls is not None else inner.calls
    if a.function == b.function and a.calls is not None and b.calls is not None:
        calls = a.calls + b.calls
    return replace(
        outer,
        forward_ms=a.forward_ms + b.forward_ms,
        backward_ms=a.backward_ms + b.backward_ms,
        optimizer_ms=a.optimizer_ms + b.optimizer_ms,
        other_ms=a.other_ms + b.other_ms,
        operators=tuple(sorted((*a.operators, *b.operators), key=lambda one: -one.ms)),
        kernels=tuple(sorted((*a.kernels, *b.kernels), key=lambda one: -one.ms)),
        calls=calls,
    )


def _finish(cost: LineCost, step_ms: float, kept: KeptBytes | None) -> LineCost:
    share = cost.total_ms / step_ms if step_ms else 0.0
    return replace(cost, share=share, kept_bytes=None if kept is None else kept.get(cost.place, 0))


# Which line of the user's code each event of a trace belongs to, and in which part of the step.

# As measure/source_lines.py names them, before file(line): function; the second one for a line that
# was already running when its step began.
MARK, RUNNING = "stepscope line ", "stepscope in line "
NODE = "autograd::engine::evaluate_function: "


class LinePhase(IntEnum):
    """The part of a step that a line's time is counted under."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    OTHER = 3


class HostLines(msgspec.Struct, frozen=True, kw_only=True):
    """For every host row: its line, as a string code of the mark's name (-1: none), and phase."""

    line: Int32s
    phase: NDArray[np.int8]
    is_mark: Bools
    operator: Bools  # rows of torch's own operators
    node: Int32s  # the node of the backward graph around each row, or -1


def find_lines(trace: Trace) -> HostLines:
    """Backward belongs to the line that its forward ran on, unless a line runs inside of it."""
    host = trace.host
    every = np.arange(len(host), dtype=np.intp)
    named = host.kind <= HostKind.ANNOTATION
    is_mark = rows_named(trace, host, named, _names_line)
    is_node = rows_named(trace, host, named, lambda name: name.startswith(NODE))
    operator = (host.kind == HostKind.OPERATOR) & ~is_mark
    mark = nearest_of(host, is_mark, every)
    node = nearest_of(host, is_node, every)
    forward = _forward_rows(trace, node)
    # A parent's row comes before its children's: a mark after the node lies inside of it.
    elsewhere = (forward >= 0) & (mark < node)
    of_forward = np.where(forward >= 0, mark[np.maximum(forward, 0)], ABSENT)
    mark = np.where(elsewhere & (of_forward >= 0), of_forward, mark)
    marked_thread = host.thread[is_mark][:1].sum()  # there is one, if any
    other_thread = (mark < 0) & (host.thread != marked_thread)
    mark = np.where(other_thread, _mark_at(trace, is_mark, host.start_ns), mark)
    line = np.where(mark >= 0, host.name[np.maximum(mark, 0)], ABSENT).astype(np.int32)
    return HostLines(
        line=line,
        phase=_phases(trace, every, operator, node),
        is_mark=is_mark,
        operator=operator,
        node=node,
    )


def _forward_rows(trace: Trace, node: Int32s) -> Int32s:
    """The forward operator of the node around each row, or -1."""
    host = trace.host
    known = host.forward_of >= 0
    rows = np.flatnonzero(known)
    by_node = np.full(len(host) + 1, ABSENT, np.int32)
    by_node[node[rows]] = host.forward_of[rows]  # a node without number writes the last place
    by_node[-1] = ABSENT
    own = nearest_of(host, known, np.arange(len(host), dtype=np.intp))
    direct = np.where(own >= 0, host.forward_of[np.maximum(own, 0)], ABSENT)
    return np.where(direct >= 0, direct, by_node[node]).astype(np.int32)


def _mark_at(trace: Trace, is_mark: Bools, times: Int64s) -> Int32s:
    """The innermost mark that is open at each time, or -1: autograd's threads work for the line
    that waits for them."""
    host = trace.host
    rows = np.flatnonzero(is_mark)
    if not len(rows):
        return np.full(len(times), ABSENT, np.int32)
    rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
    last = rows[np.maximum(np.searchsorted(host.start_ns[rows], times, side="right") - 1, 0)]
    mark: Int32s = np.where(times < host.start_ns[rows[0]], ABSENT, last).astype(np.int32)
    around = nearest_of(host, is_mark, host.parent)
    active = np.flatnonzero(mark >= 0)
    while len(active):
        over = host.start_ns[mark[active]] + host.dur_ns[mark[active]] <= times[active]
        active = active[over]
        mark[active] = around[mark[active]]
        active = active[mark[active] >= 0]
    return mark


def _phases(trace: Trace, rows: Indices, operator: Bools, node: Int32s) -> NDArray[np.int8]:
    host = trace.host
    inside = nearest_of(host, operator, rows) >= 0
    phase = np.where(inside, LinePhase.FORWARD, LinePhase.OTHER).astype(np.int8)
    phase[(node >= 0) | (host.forward_of >= 0)] = LinePhase.BACKWARD
    phase[in_optimizer(trace, rows)] = LinePhase.OPTIMIZER
    named = host.kind <= HostKind.ANNOTATION
    loading = rows_named(trace, host, named, DATA_LOADING.search)
    phase[nearest_of(host, loading, rows) >= 0] = LinePhase.OTHER
    return phase


def _names_line(name: str) -> bool:
    return name.startswith((MARK, RUNNING))


def nest(trace: Trace) -> Trace:
    """End every event with the line that it began on.

    A step ends inside its optimizer's step, and with it the marks: the optimizer's own events end a
    little later.
    """
    host = trace.host
    is_mark = rows_named(trace, host, host.kind <= HostKind.ANNOTATION, _names_line)
    around = _mark_at(trace, is_mark, host.start_ns)
    ends = host.start_ns + host.dur_ns
    here = np.maximum(around, 0)
    cut = (around >= 0) & ~is_mark & (host.thread == host.thread[here])
    cut &= around < np.arange(len(host))  # of those that begin together, the earlier is outside
    ends = np.where(cut, np.minimum(ends, ends[here]), ends)
    parent = find_parents(host.thread, host.start_ns, ends)
    return replace(trace, host=replace(host, dur_ns=ends - host.start_ns, parent=parent))


# The steps' time, divided among lines so that nothing is counted twice and nothing is lost.
#
# On the CPU, every moment of the training thread belongs to the innermost line that runs. On an
# accelerator, every moment of the device belongs to the line of the kernel that runs, and a gap to
# the line of the kernel that ends it: that line's launch was late.


class DividedTime(msgspec.Struct, frozen=True, kw_only=True):
    """Pieces of time with the line (-1: none) and phase of each; they add up to `total_ns`."""

    line: Int32s
    phase: NDArray[np.int8]
    dur_ns: Int64s
    total_ns: int
    steps: int  # how many were divided


def divide_time(trace: Trace, lines: HostLines, work: Work, steps: Steps) -> DividedTime:
    """All marked steps of the trace."""
    if work.on_host:
        # Each row's own time: its duration without that of the rows inside it.
        host = trace.host
        here = host.thread == host.thread[np.flatnonzero(lines.is_mark)[0]]
        inside = here & (step_of(steps.steps, host.start_ns) >= 0)
        own = host.dur_ns - children_sum(host.parent, host.dur_ns)
        rows = np.flatnonzero(inside)
        total = sum(step.dur_ns for step in steps.steps)
        rest = total - int(own[rows].sum())  # between rows that overlap a step's edge
        return DividedTime(
            line=np.append(lines.line[rows], ABSENT).astype(np.int32),
            phase=np.append(lines.phase[rows], LinePhase.OTHER).astype(np.int8),
            dur_ns=np.append(own[rows], rest),
            total_ns=total,
            steps=len(steps.steps),
        )
    return _divide_device(trace, lines, work, steps)


def _divide_device(trace: Trace, lines: HostLines, work: Work, steps: Steps) -> DividedTime:
    """From the first work that the marked steps launched to the end of their last."""
    launch = launches_of(trace, work)
    linked = np.flatnonzero(launch >= 0)
    number = step_of(steps.steps, trace.host.start_ns[launch[linked]])
    linked, number = linked[number >= 0], number[number >= 0]
    order = linked[np.argsort(work.start_ns[linked], kind="stable")]
    if not len(order):
        nothing = np.empty(0, np.int64)
        return DividedTime(
            line=nothing.astype(np.int32),
            phase=nothing.astype(np.int8),
            dur_ns=nothing,
            total_ns=0,
            steps=0,
        )
    ends = np.maximum.accumulate(work.end_ns[order])
    before = np.append(work.start_ns[order[0]], ends[:-1])
    rows = launch[order]
    # From the end of all earlier work to its own end: the gap before it, and what it adds.
    return DividedTime(
        line=lines.line[rows],
        phase=lines.phase[rows],
        dur_ns=ends - before,
        total_ns=int(ends[-1] - before[0]),
        steps=len(distinct(number)),
    )


# What a line's time consists of: its operators with their shapes, its kernels, its calls.

MOST_ROWS = 40  # of one line, the longest


def count_calls(trace: Trace, lines: HostLines, steps: Steps) -> dict[int, float]:
    """How often each line runs in a step, by its code."""
    begins = rows_named(trace, trace.host, lines.is_mark, lambda name: name.startswith(MARK))
    rows = np.flatnonzero(begins & (step_of(steps.steps, trace.host.start_ns) >= 0))
    first, inverse, count = group(trace.host.name[rows])
    times = np.bincount(inverse, minlength=count) / max(1, len(steps.steps))
    return dict(zip(trace.host.name[rows[first]].tolist(), times.tolist(), strict=True))


def list_line_operators(
    trace: Trace, lines: HostLines, work: Work, steps: Steps, scale: float
) -> dict[int, tuple[LineOperator, ...]]:
    """The outermost operators of each line, longest first; `scale` makes milliseconds of a step."""
    host = trace.host
    rows = np.flatnonzero(_outermost(trace, lines) & (step_of(steps.steps, host.start_ns) >= 0))
    rows = rows[lines.line[rows] >= 0]
    took = host.dur_ns if work.on_host else sum_device_time(trace, work).inclusive
    first, inverse, count = group(lines.line[rows], host.name[rows], host.shapes[rows])
    calls = np.bincount(inverse, minlength=count) / max(1, len(steps.steps))
    total = sum_by(inverse, took[rows], count)
    found: dict[int, list[LineOperator]] = {}
    for place in np.argsort(-total, kind="stable").tolist():
        row = rows[first[place]]
        mine = found.setdefault(int(lines.line[row]), [])
        if len(mine) < MOST_ROWS:
            code = int(host.shapes[row])
            mine.append(
                LineOperator(
                    name=trace.strings[host.name[row]].removeprefix(NODE),
                    calls=float(calls[place]),
                    ms=float(total[place]) * scale,
                    shapes=None if code == ABSENT else trace.strings[code],
                )
            )
    return {code: tuple(operators) for code, operators in found.items()}


def list_line_kernels(
    trace: Trace, lines: HostLines, work: Work, steps: Steps, scale: float
) -> dict[int, tuple[LineKernel, ...]]:
    """What each line ran on the accelerator, longest first; nothing on the CPU."""
    if work.on_host:
        return {}
    launch = launches_of(trace, work)
    pieces = np.flatnonzero(launch >= 0)
    pieces = pieces[step_of(steps.steps, trace.host.start_ns[launch[pieces]]) >= 0]
    pieces = pieces[lines.line[launch[pieces]] >= 0]
    names = trace.device.name[work.rows[pieces]]
    first, inverse, count = group(lines.line[launch[pieces]], names)
    total = sum_by(inverse, (work.end_ns - work.start_ns)[pieces], count)
    found: dict[int, list[LineKernel]] = {}
    for place in np.argsort(-total, kind="stable").tolist():
        piece = pieces[first[place]]
        mine = found.setdefault(int(lines.line[launch[piece]]), [])
        if len(mine) < MOST_ROWS:
            name = trace.strings[trace.device.name[work.rows[piece]]]
            mine.append(LineKernel(name=name, ms=float(total[place]) * scale))
    return {code: tuple(kernels) for code, kernels in found.items()}


def _outermost(trace: Trace, lines: HostLines) -> Bools:
    """Operators that no other operator encloses between them and their line's mark."""
    host = trace.host
    rows: Indices = np.flatnonzero(lines.operator)
    around = nearest_of(host, lines.operator, host.parent[rows])
    mark = nearest_of(host, lines.is_mark, rows)
    outer = np.zeros(len(host), np.bool_)
    outer[rows[(around < 0) | (around < mark)]] = True
    return outer


# How long operators take, as a trace with marked lines shows: by name and shapes, or by likeness.
#
# An operator that was measured with other shapes is scaled by its FLOPs, where it multiplies, else
# by the bytes of its inputs.

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
        shapes = decode_list(trace, int(host.shapes[row]))
        dtypes = decode_list(trace, int(host.dtypes[row]))
        key = (trace.strings[host.name[row]], tensor_shapes(shapes), first_dtype(dtypes))
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
    item = PROFILER_BYTES.get(dtype, _FALLBACK_BYTES)
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


def first_dtype(dtypes: Sequence[object]) -> str:
    """The one that an operator is looked up by."""
    return next((one for one in dtypes if isinstance(one, str) and one in PROFILER_BYTES), "")
