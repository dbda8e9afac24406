"""From a trace with marked lines to the cost of each line.

The times of the marked steps are scaled to the step as it is without the profiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from stepscope.errors import NotCapturedError
from stepscope.explain.call_tree import group
from stepscope.explain.lines.details import count_calls, list_line_kernels, list_line_operators
from stepscope.explain.lines.divide import divide_time
from stepscope.explain.lines.marks import LinePhase, find_lines, nest, place_of_mark
from stepscope.explain.steps import find_steps
from stepscope.explain.work import find_work
from stepscope.records.line_costs import LineCost, LineCosts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from stepscope.explain.lines.divide import DividedTime
    from stepscope.records.line_costs import LineKernel, LineOperator
    from stepscope.records.trace import Trace

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
        place = place_of_mark(trace.strings[code])
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
