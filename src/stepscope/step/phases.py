"""Tell which part of a step an operator belongs to: forward, backward, the optimizer's own
work, recomputation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.explanation import Steps
from stepscope.records.rank_facts import OptimizerLine
from stepscope.records.source_lines import Place
from stepscope.records.trace import ABSENT, HostEvents, HostKind, Trace
from stepscope.step.arrays import Bools, Int32s
from stepscope.step.steps import step_of
from stepscope.step.work import rows_named
from stepscope.trace.links import nearest_of

# Which part of a step an operator belongs to, and which operators run for the second time.

PHASES = ("forward", "backward", "optimizer", "other")
FORWARD, BACKWARD, OPTIMIZER, OTHER = range(4)
_OPTIMIZER = re.compile(r"Optimizer\.(?:step|zero_grad)#")


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """Per host row."""

    phase: NDArray[np.int8]
    node: NDArray[np.bool_]  # a node of the backward pass
    stepping: NDArray[np.bool_]  # an optimizer's own annotation


def is_backward(name: str) -> bool:
    """Autograd's own names of nodes of the backward pass."""
    return (
        name.startswith("autograd::engine::evaluate_function")
        or name.rstrip("0123456789").endswith("Backward")
        or name == "<backward op>"
    )


def find_phases(trace: Trace, steps: Steps) -> Phases:
    """By what surrounds a row; after a step's last backward, a row belongs to neither pass."""
    host = trace.host
    operator = host.kind == HostKind.OPERATOR
    node = rows_named(trace, host, operator, is_backward) | (operator & (host.forward_thread > 0))
    stepping = rows_named(trace, host, host.kind == HostKind.ANNOTATION, _OPTIMIZER.match)
    phase = np.full(len(host), FORWARD, np.int8)
    phase[_after_backward(host, steps, node)] = OTHER
    phase[_inside(host, node)] = BACKWARD
    phase[in_optimizer(trace, np.arange(len(host)))] = OPTIMIZER
    return Phases(phase=phase, node=node, stepping=stepping)


def _inside(host: HostEvents, marked: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Marked rows and all rows below them. In the order of records/trace.py, a row above is an
    earlier row of the same thread that does not end before."""
    if not marked.any():
        return marked
    end = host.start_ns + host.dur_ns
    end = end - end.min()
    if int(end.max()) >= 2**62 // (int(host.thread.max()) + 1):  # then ranks instead of times
        end = np.unique(end, return_inverse=True)[1].reshape(-1).astype(np.int64)
    end += host.thread * (end.max() + 1)
    inside: NDArray[np.bool_] = np.maximum.accumulate(np.where(marked, end, -1)) >= end
    return inside


def _after_backward(host: HostEvents, steps: Steps, node: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rows of a step that begin after all of its backward nodes have begun."""
    nodes = np.flatnonzero(node)
    if not len(nodes) or not steps.steps:
        return np.zeros(len(host), np.bool_)
    never = np.iinfo(np.int64).max
    where = step_of(steps.steps, host.start_ns[nodes])
    last = np.full(len(steps.steps) + 1, -1, np.int64)
    np.maximum.at(last, where, host.start_ns[nodes])
    last[-1] = -1  # in no step
    last[last < 0] = never
    after: NDArray[np.bool_] = host.start_ns > last[step_of(steps.steps, host.start_ns)]
    return after


def find_recomputed(
    trace: Trace,
    phases: Phases,
    rows: NDArray[np.intp],
    signature: NDArray[np.intp],
    counted: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Which rows repeat in backward what the forward pass has done with the same shapes.

    Backward runs without recording for autograd. What carries a sequence number inside it was run
    by a checkpoint, or the graph of gradients is kept (create_graph): where no product of the
    backward pass is without a number, it is the latter, and nothing counts as recomputed.
    """
    host = trace.host
    none = np.zeros(len(rows), np.bool_)
    numbered = (host.kind == HostKind.OPERATOR) & (host.sequence >= 0) & ~phases.node
    numbered &= phases.phase == BACKWARD
    if not numbered.any():
        return none
    backward = phases.phase[rows] == BACKWARD
    places = np.flatnonzero(backward)
    near = nearest_of(host, numbered | phases.node, rows[places])
    like_forward = none.copy()
    like_forward[places] = (near >= 0) & numbered[np.maximum(near, 0)]
    if not (counted[rows] & backward & ~like_forward).any():
        return none
    before = np.zeros(int(signature.max(initial=-1)) + 1, np.bool_)
    before[signature[~backward]] = True
    recomputed: NDArray[np.bool_] = like_forward & before[signature]
    return recomputed


# Which part of an optimizer's step is its own work.
#
# torch marks the whole call `Optimizer.step#...`. Where the script hands it a closure (LBFGS needs
# one, Lightning always does so), forward and backward run inside that mark: they are not its own.

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
        in_closure: Bools = nearest_of(host, closures, rows) >= 0
    else:
        # A trace that says nothing of closures: what begins before the step's last
        # backward node has ended belongs to the closure.
        nodes = np.flatnonzero(rows_named(trace, host, host.kind == HostKind.OPERATOR, _NODE.match))
        places = np.flatnonzero(marks)
        places = places[np.argsort(host.start_ns[places], kind="stable")]
        start, end = host.start_ns[places], host.start_ns[places] + host.dur_ns[places]
        which = np.searchsorted(start, host.start_ns[nodes], side="right") - 1
        inside = (which >= 0) & (host.start_ns[nodes] < end[np.maximum(which, 0)])
        until = np.full(len(host), np.iinfo(np.int64).min, np.int64)
        node_end = host.start_ns[nodes] + host.dur_ns[nodes]
        np.maximum.at(until, places[which[inside]], node_end[inside])
        in_closure = (step >= 0) & (host.start_ns[rows] < until[np.maximum(step, 0)])
    return np.where(in_closure & ~marks[rows], ABSENT, step).astype(np.int32)


def in_optimizer(trace: Trace, rows: NDArray[np.integer]) -> Bools:
    """Whether each host row is a part of an optimizer's step, or resets gradients."""
    host = trace.host
    resets = rows_named(trace, host, host.kind <= HostKind.ANNOTATION, _ZERO_GRAD.match)
    resetting: Bools = nearest_of(host, resets, rows) >= 0
    return resetting | (in_optimizer_step(trace, rows) >= 0)
