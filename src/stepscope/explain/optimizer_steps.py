"""Which part of an optimizer's step is its own work.

torch marks the whole call `Optimizer.step#...`. Where the script hands it a closure (LBFGS needs
one, Lightning always does so), forward and backward run inside that mark: they are not its own.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.work import rows_named
from stepscope.records.trace import ABSENT, HostKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from stepscope.explain.arrays import Bools, Int32s
    from stepscope.records.optimizer_line import OptimizerLine
    from stepscope.records.place import Place
    from stepscope.records.trace import Trace

_STEP = re.compile(r"Optimizer\.step#")
_ZERO_GRAD = re.compile(r"Optimizer\.zero_grad#")
_CLOSURE = re.compile(r"stepscope: closure$")  # written by capture around every call of one
_NODE = re.compile(r"autograd::engine::evaluate_function")


def places_of_steps(lines: Iterable[OptimizerLine]) -> dict[str, Place]:
    """By the name of torch's mark; nothing for a class whose optimizers several lines call."""
    found: dict[str, set[Place]] = {}
    for line in lines:
        found.setdefault(f"Optimizer.step#{line.optimizer}.step", set()).add(line.place)
    return {name: places.pop() for name, places in found.items() if len(places) == 1}


def in_optimizer_step(trace: Trace, rows: NDArray[np.integer]) -> Int32s:
    """The mark of the optimizer's step that each host row is a part of, or -1."""
    host = trace.host
    annotation = host.kind <= HostKind.ANNOTATION
    marks = rows_named(trace, host, annotation, _STEP.match)
    step: Int32s = nearest_of(host, marks, rows)
    if not (step >= 0).any():
        return step
    closures = rows_named(trace, host, annotation, _CLOSURE.match)
    if closures.any():
        in_closure = nearest_of(host, closures, rows) >= 0
    else:
        in_closure = _before_backward_ends(trace, marks, step, rows)
    return np.where(in_closure & ~marks[rows], ABSENT, step).astype(np.int32)


def in_optimizer(trace: Trace, rows: NDArray[np.integer]) -> Bools:
    """Whether each host row is a part of an optimizer's step, or resets gradients."""
    host = trace.host
    resets = rows_named(trace, host, host.kind <= HostKind.ANNOTATION, _ZERO_GRAD.match)
    resetting: Bools = nearest_of(host, resets, rows) >= 0
    return resetting | (in_optimizer_step(trace, rows) >= 0)


def _before_backward_ends(
    trace: Trace, marks: Bools, step: Int32s, rows: NDArray[np.integer]
) -> Bools:
    """A trace that says nothing of closures: what begins before the step's last backward node has
    ended belongs to the closure."""
    host = trace.host
    nodes = np.flatnonzero(rows_named(trace, host, host.kind == HostKind.OPERATOR, _NODE.match))
    places = np.flatnonzero(marks)
    places = places[np.argsort(host.start_ns[places], kind="stable")]
    start, end = host.start_ns[places], host.start_ns[places] + host.dur_ns[places]
    which = np.searchsorted(start, host.start_ns[nodes], side="right") - 1
    inside = (which >= 0) & (host.start_ns[nodes] < end[np.maximum(which, 0)])
    until = np.full(len(host), np.iinfo(np.int64).min, np.int64)
    node_end = host.start_ns[nodes] + host.dur_ns[nodes]
    np.maximum.at(until, places[which[inside]], node_end[inside])
    before: Bools = (step >= 0) & (host.start_ns[rows] < until[np.maximum(step, 0)])
    return before
