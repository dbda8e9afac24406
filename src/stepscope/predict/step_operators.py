"""The operator calls of a step, and the time that each of them takes in both passes.

A framework's call is an outermost operator of the forward pass, also where backward runs it again.
Autograd's nodes of the backward pass belong to the call that created them. What no such call owns
(the optimizer's operators, those of a custom backward) are calls of their own, without a backward.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.explain.replay.build import call_phases
from stepscope.explain.replay.graph import Phase
from stepscope.explain.work import rows_named
from stepscope.predict.autocast_inputs import values_read, widths_by_argument
from stepscope.predict.by_text import by_text
from stepscope.records.lazy_pattern import lazy_pattern
from stepscope.records.trace import HostKind
from stepscope.trace.links import distinct, nearest_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.replay.graph import Flags, Floats, Ints
    from stepscope.predict.step_context import StepContext
    from stepscope.records.trace import Trace

# Others are annotations, autograd's nodes, or operators whose text argument is not recorded.
_OPERATOR = lazy_pattern(r"^\w+::\w+$")
_NOT_RECORDED = frozenset({"aten::einsum"})
_BETWEEN_MACHINES = lazy_pattern(r"HtoD|DtoH", re.I)
_LISTS = lazy_pattern(r"^aten::_(?:foreach|fused|amp_foreach)_")
_TENSOR_LIST = "TensorList"


class TracedCall(msgspec.Struct, frozen=True, kw_only=True):
    """Lists have one entry per argument; a list of tensors has a list of shapes."""

    name: str
    shapes: tuple[Any, ...]
    strides: tuple[Any, ...]  # empty if the trace does not say
    dtypes: tuple[str, ...]
    concrete: tuple[str, ...]
    in_forward: bool = True  # the precision matters to it, and it may have a backward
    widths: tuple[int, ...] = ()  # bytes of an element under autocast; 0 where not known


class StepOperators(msgspec.Struct, frozen=True, kw_only=True):
    """Items are the calls of a CPU step's graph, or the tasks of a device's."""

    calls: tuple[TracedCall, ...]  # in order of their start
    owner: Ints  # of each item: its place in `calls`, -1 if none
    in_backward: Flags  # of each item
    item_ns: Floats

    def pass_ns(self, *, backward: bool) -> Floats:
        """The time of each call in one pass."""
        mine = (self.owner >= 0) & (self.in_backward == backward)
        sums: Floats = np.bincount(
            self.owner[mine], self.item_ns[mine], minlength=len(self.calls)
        ).astype(np.float64)
        return sums


def find_step_operators(context: StepContext) -> StepOperators:
    """Empty if the trace has no operators or no shapes."""
    trace, graph = context.trace, context.graph
    item_call, item_ns = graph.tasks.call, graph.tasks.dur_ns
    if context.on_host:
        item_call, item_ns = np.arange(len(graph.calls), dtype=np.int32), graph.calls.call_ns
    if not len(trace.host) or not len(item_call):
        nothing = np.full(len(item_ns), -1, np.int32)
        return StepOperators(calls=(), owner=nothing, in_backward=nothing > 0, item_ns=item_ns)
    operator = _is_operator(trace)
    launched_by = _outermost(trace, operator, graph.calls.row[item_call])
    created_by = _creators(trace, operator, graph.calls.operator[item_call])
    again = launched_by[:0] if context.on_host else launched_by[context.operators.recomputed]
    forward_rows = _forward_rows(context, operator, again)
    number = _numbers(trace, forward_rows)
    free = (number[launched_by] < 0) & (number[created_by] < 0)
    rows, in_forward = _joined(trace, forward_rows, _alone_rows(context, launched_by, free))
    number = _numbers(trace, rows)
    own = number[launched_by]
    owner = np.where(own >= 0, own, number[created_by])
    return StepOperators(
        calls=tuple(_read_calls(context, operator, rows, in_forward)),
        owner=np.where(_crosses_machines(context), -1, owner).astype(np.int32),
        in_backward=own < 0,
        item_ns=item_ns,
    )


def _numbers(trace: Trace, rows: NDArray[np.intp]) -> Ints:
    """Each host row's place among `rows`, or -1; row -1 reads the last entry."""
    number = np.full(len(trace.host) + 1, -1, np.int32)
    number[rows] = np.arange(len(rows), dtype=np.int32)
    return number


def _is_operator(trace: Trace) -> Flags:
    """Rows of operators that can be called again with what the trace says of them."""

    def is_operator(name: str) -> bool:
        return _OPERATOR.search(name) is not None and name not in _NOT_RECORDED

    host = trace.host
    return rows_named(trace, host, host.kind == HostKind.OPERATOR, is_operator)


def _outermost(trace: Trace, operator: Flags, rows: NDArray[Any]) -> Ints:
    """The operator around each host row that no other one encloses, or -1."""
    found = nearest_of(trace.host, operator, rows)
    inner = np.flatnonzero(found >= 0)
    while len(inner):
        outer = nearest_of(trace.host, operator, trace.host.parent[found[inner]])
        inner, outer = inner[outer >= 0], outer[outer >= 0]
        found[inner] = outer
    return found


def _forward_rows(context: StepContext, operator: Flags, again: Ints) -> NDArray[np.intp]:
    """Outermost operators of the step's forward pass, also those that launch nothing and those
    that backward runs `again`."""
    host, calls = context.trace.host, context.graph.calls
    known = calls.row[calls.row >= 0]
    known = known[host.kind[known] <= HostKind.RUNTIME] if len(known) else known
    if not len(known):
        return np.zeros(0, np.intp)
    first, last = host.start_ns[known].min(), host.start_ns[known].max()
    # A CPU's first call is the operator itself; a device's first launch is inside its operator.
    starts_inside = (host.start_ns <= last) & (host.start_ns + host.dur_ns >= first)
    candidates = np.flatnonzero(operator & (host.shapes >= 0) & starts_inside)
    outer = candidates[_outermost(context.trace, operator, candidates) == candidates]
    outer = outer[call_phases(context.trace, outer) == Phase.FORWARD]
    again = again[again >= 0]
    again = again[host.shapes[again] >= 0].astype(np.intp)
    return distinct(np.concatenate((outer, again)))


def _creators(trace: Trace, operator: Flags, top: Ints) -> Ints:
    """The outermost forward operator that created each backward node, or -1."""
    created = np.where(top >= 0, trace.host.forward_of[np.maximum(top, 0)], -1)
    creators = np.full(len(top), -1, np.int32)
    known = np.flatnonzero(created >= 0)
    creators[known] = _outermost(trace, operator, created[known])
    return creators


def _alone_rows(context: StepContext, launched_by: Ints, free: Flags) -> NDArray[np.intp]:
    """Operators that belong to no forward call, if the trace has their shapes."""
    rows = distinct(launched_by[free & (launched_by >= 0)]).astype(np.intp)
    return rows[context.trace.host.shapes[rows] >= 0]


def _joined(
    trace: Trace, forward: NDArray[np.intp], alone: NDArray[np.intp]
) -> tuple[NDArray[np.intp], Flags]:
    """All rows in order of their start, and which of them are the forward pass's."""
    rows = np.concatenate((forward, alone))
    order = np.argsort(trace.host.start_ns[rows], kind="stable")
    return rows[order], np.arange(len(rows))[order] < len(forward)


def _crosses_machines(context: StepContext) -> Flags:
    """Copies between the host and the device: their time is the link's, not an operator's."""
    tasks, trace = context.graph.tasks, context.trace
    if context.on_host:
        return np.zeros(len(context.graph.calls), np.bool_)

    def crosses(name: str) -> bool:
        return _BETWEEN_MACHINES.search(name) is not None

    return by_text(trace, trace.device.name, tasks.row, crosses, False)


def _read_calls(
    context: StepContext, operator: Flags, rows: NDArray[np.intp], in_forward: Flags
) -> list[TracedCall]:
    host, strings = context.trace.host, context.trace.strings
    columns = (host.name, host.shapes, host.strides, host.dtypes, host.concrete)
    read = values_read(context, lambda created: _outermost(context.trace, operator, created))
    keys = list(
        zip(
            *(column[rows].tolist() for column in columns),
            in_forward.tolist(),
            [read.get(row, ()) for row in rows.tolist()],
            strict=True,
        )
    )
    shapes = context.parameters.shapes if context.parameters else ()
    known = {key: _with_lists(_read_call(strings, *key), shapes) for key in dict.fromkeys(keys)}
    return [known[key] for key in keys]


def _read_call(
    strings: tuple[str, ...],
    name: int,
    shapes: int,
    strides: int,
    dtypes: int,
    concrete: int,
    in_forward: bool,
    read: tuple[tuple[int, int], ...],
) -> TracedCall:
    def entries(code: int) -> tuple[Any, ...]:
        return tuple(msgspec.json.decode(strings[code])) if code >= 0 else ()

    given = entries(shapes)
    return TracedCall(
        name=strings[name],
        shapes=given,
        strides=entries(strides),
        dtypes=entries(dtypes),
        concrete=entries(concrete),
        in_forward=in_forward,
        widths=widths_by_argument(given, entries(dtypes), read) if read else (),
    )


def _with_lists(call: TracedCall, parameters: tuple[tuple[int, ...], ...]) -> TracedCall:
    """The profiler leaves out the shapes of long lists: an optimizer's are the parameters'."""
    if not parameters or not _LISTS.search(call.name):
        return call
    every = [list(shape) for shape in parameters]
    shapes = tuple(
        every if dtype == _TENSOR_LIST and not dims else dims
        for dims, dtype in zip(call.shapes, call.dtypes, strict=False)
    )
    return msgspec.structs.replace(call, shapes=shapes, strides=(), in_forward=False)
