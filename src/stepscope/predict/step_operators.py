"""List the operator calls of a step with their times, and the same calls with another batch
or in another precision.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.predict.autocast import values_read, widths_by_argument
from stepscope.predict.peak_memory.backward_graph import NARROW
from stepscope.predict.step_context import StepContext
from stepscope.records.change_values import precision_of, uses_autocast
from stepscope.records.hardware import OperatorCall, Output
from stepscope.records.trace import HostKind, Trace
from stepscope.step.graph import Phase, call_phases
from stepscope.step.work import rows_named
from stepscope.text.words import lazy_pattern
from stepscope.trace.links import distinct, nearest_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.step.graph import Flags, Floats, Ints

    Shape = tuple[int, ...]
    Describe = Callable[[OperatorCall], Sequence[Output] | None]

# The operator calls of a step, and the time that each of them takes in both passes.
#
# A framework's call is an outermost operator of the forward pass, also where backward runs it
# again. Autograd's nodes of the backward pass belong to the call that created them. What no such
# call owns (the optimizer's operators, those of a custom backward) are calls of their own, without
# a backward.

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
    host = trace.host
    # Operators that can be called again with what the trace says of them.
    operator = rows_named(
        trace,
        host,
        host.kind == HostKind.OPERATOR,
        lambda name: bool(_OPERATOR.search(name)) and name not in _NOT_RECORDED,
    )
    launched_by = _outermost(trace, operator, graph.calls.row[item_call])
    # The outermost forward operator that created each backward node, or -1.
    top = graph.calls.operator[item_call]
    created = np.where(top >= 0, host.forward_of[np.maximum(top, 0)], -1)
    created_by = np.full(len(top), -1, np.int32)
    known = np.flatnonzero(created >= 0)
    created_by[known] = _outermost(trace, operator, created[known])
    again = launched_by[:0] if context.on_host else launched_by[context.operators.recomputed]
    forward = _forward_rows(context, operator, again)
    number = _numbers(trace, forward)
    # Operators that belong to no forward call, if the trace has their shapes.
    free = (number[launched_by] < 0) & (number[created_by] < 0) & (launched_by >= 0)
    alone = distinct(launched_by[free]).astype(np.intp)
    alone = alone[host.shapes[alone] >= 0]
    rows = np.concatenate((forward, alone))
    order = np.argsort(host.start_ns[rows], kind="stable")
    rows, in_forward = rows[order], order < len(forward)
    number = _numbers(trace, rows)
    own = number[launched_by]
    owner = np.where(own >= 0, own, number[created_by])
    if not context.on_host:  # copies between host and device: their time is the link's
        owner = np.where(context.kernels_named(_BETWEEN_MACHINES.search), -1, owner)
    return StepOperators(
        calls=tuple(_read_calls(context, operator, rows, in_forward)),
        owner=owner.astype(np.int32),
        in_backward=own < 0,
        item_ns=item_ns,
    )


def _numbers(trace: Trace, rows: NDArray[np.intp]) -> Ints:
    """Each host row's place among `rows`, or -1; row -1 reads the last entry."""
    number = np.full(len(trace.host) + 1, -1, np.int32)
    number[rows] = np.arange(len(rows), dtype=np.int32)
    return number


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


def _read_calls(
    context: StepContext, operator: Flags, rows: NDArray[np.intp], in_forward: Flags
) -> list[TracedCall]:
    host, strings = context.trace.host, context.trace.strings
    columns = (host.name, host.shapes, host.strides, host.dtypes, host.concrete)
    read = values_read(context, lambda created: _outermost(context.trace, operator, created))
    values = [read.get(row, ()) for row in rows.tolist()]
    codes = (column[rows].tolist() for column in columns)
    keys = list(zip(*codes, in_forward.tolist(), values, strict=True))
    parameters = [list(shape) for shape in context.parameters.shapes] if context.parameters else []
    known = {key: _read_call(strings, key, parameters) for key in dict.fromkeys(keys)}
    return [known[key] for key in keys]


def _read_call(
    strings: tuple[str, ...], key: tuple[Any, ...], parameters: list[list[int]]
) -> TracedCall:
    code, *codes, in_forward, read = key
    name = strings[code]
    shapes, strides, dtypes, concrete = (
        tuple(msgspec.json.decode(strings[code])) if code >= 0 else () for code in codes
    )
    widths = widths_by_argument(shapes, dtypes, read) if read else ()
    if parameters and _LISTS.search(name):
        # The profiler leaves out the shapes of long lists: an optimizer's are the parameters'.
        shapes = tuple(
            parameters if dtype == _TENSOR_LIST and not dims else dims
            for dims, dtype in zip(shapes, dtypes, strict=False)
        )
        strides, in_forward = (), False
    return TracedCall(
        name=name,
        shapes=shapes,
        strides=strides,
        dtypes=dtypes,
        concrete=concrete,
        in_forward=in_forward,
        widths=widths,
    )


# A step's operator calls with another batch: which sides of their tensors grow.
#
# A trace has shapes but no names of dimensions. A side grows if it is a multiple of the batch and
# comes first, or is the batch itself and comes second; parameters keep their shapes, and so does
# what has an entry for each group of rows. Where that is wrong, the operator refuses such tensors,
# and the call counts as not known.

# Operators whose plain argument is the shape of their result.
_SHAPED_BY = frozenset(
    f"aten::{name}" for name in ("view", "reshape", "_unsafe_view", "expand", "zeros", "ones")
)
# Arguments with an entry for each group of rows, such as those of an expert: the rows grow.
_PER_GROUP = {"aten::_grouped_mm": (1, 2), "aten::_scaled_grouped_mm": (1, 3, 4)}


def grow_calls(
    calls: Sequence[TracedCall], parameters: Collection[Shape], *, batch: int, factor: float
) -> tuple[TracedCall, ...]:
    """The optimizer's calls stay as they are."""
    grown: dict[int, TracedCall] = {}  # equal calls are one object
    for call in calls:
        if call.in_forward and id(call) not in grown:
            grown[id(call)] = _grow_call(call, parameters, batch, factor)
    return tuple(grown.get(id(call), call) for call in calls)


def _grow_call(
    call: TracedCall, parameters: Collection[Shape], batch: int, factor: float
) -> TracedCall:
    def grow(dims: Any, steps: Any) -> tuple[Any, Any]:
        if dims and isinstance(dims[0], list):
            each_steps = steps if steps and len(steps) == len(dims) else [None] * len(dims)
            pairs = [grow(one, step) for one, step in zip(dims, each_steps, strict=True)]
            return [pair[0] for pair in pairs], [pair[1] for pair in pairs] if steps else steps
        # Products take weights transposed.
        if tuple(dims) in parameters or (*dims[:-2], *dims[-2:][::-1]) in parameters:
            return dims, steps
        side = _growing_side(dims, batch)
        if side is None:
            return dims, steps
        if steps and side < len(steps):  # dimensions that step over the growing one step farther
            steps = [round(step * factor) if step > steps[side] else step for step in steps]
        return _with_side(dims, side, factor), steps

    strides = call.strides or (None,) * len(call.shapes)
    stays = _PER_GROUP.get(call.name, ())
    pairs = [
        (dims, steps) if at in stays else grow(dims, steps)
        for at, (dims, steps) in enumerate(zip(call.shapes, strides, strict=True))
    ]
    concrete = call.concrete
    if call.name in _SHAPED_BY:
        concrete = tuple(_grow_text(text, batch, factor) for text in concrete)
    return replace(
        call,
        shapes=tuple(pair[0] for pair in pairs),
        strides=tuple(pair[1] for pair in pairs) if call.strides else (),
        concrete=concrete,
    )


def _growing_side(dims: Sequence[int], batch: int) -> int | None:
    if dims and dims[0] and dims[0] % batch == 0:
        return 0
    return 1 if len(dims) > 1 and dims[1] == batch else None


def _with_side(dims: Sequence[int], place: int, factor: float) -> list[int]:
    return [round(side * factor) if at == place else side for at, side in enumerate(dims)]


def _grow_text(text: str, batch: int, factor: float) -> str:
    """A list of sides such as [4, 96, 128]; any other argument stays."""
    try:
        dims = msgspec.json.decode(text, type=list[int])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return text
    place = _growing_side(dims, batch)
    return text if place is None else json.dumps(_with_side(dims, place, factor))


# Which dtype each input of a step's calls would have in another precision.
#
# A trace has shapes but no tensors. Where the captured graph says what an operator reads, the rules
# of autocast decide (autocast.py). Else an input is taken to be the last output of its
# shape; where one call has several inputs of a shape, the others are the widest of the last few: a
# sum joins what a product returned with a residual stream that may be wider.

_WIDTHS = {"double": 3, "float": 2, "c10::Half": 1, "c10::BFloat16": 1}
_REMEMBERED = 6  # outputs of a shape
_FULL, _NARROW = "float", {"bf16": "c10::BFloat16", "fp16": "c10::Half"}


def follow_values(
    calls: Sequence[TracedCall],
    parameters: Collection[Shape] | None,
    mode: str,
    describe: Describe,
    *,
    traced: str = "",
) -> list[OperatorCall]:
    """The calls as they would be made in a mode. `describe` gives a call's outputs, None if they
    are not known; `parameters` are the model's shapes, None if they are not known; `traced` is the
    mode that the trace was recorded in."""
    outputs: dict[Shape, deque[Output]] = {}
    made = []
    for call in calls:
        if not call.in_forward:  # the optimizer's and autograd's own run alike in any precision
            made.append(_operator_call(call, call.dtypes, "0" * len(call.shapes), ""))
            continue
        wanted = _as_made(call, parameters, mode, outputs, changes=mode != traced)
        made.append(wanted)
        for output in describe(wanted) or ():
            if output.dtype in _WIDTHS:
                recent = outputs.setdefault(tuple(output.shape), deque(maxlen=_REMEMBERED))
                recent.append(output)
    return made


def _as_made(
    call: TracedCall,
    parameters: Collection[Shape] | None,
    mode: str,
    outputs: dict[Shape, deque[Output]],
    *,
    changes: bool,
) -> OperatorCall:
    dtypes, grads = list(call.dtypes), []
    taken: set[Shape] = set()
    for place in reversed(range(len(call.shapes))):
        shape, dtype = call.shapes[place], dtypes[place] if place < len(dtypes) else ""
        if shape and isinstance(shape[0], list):
            needs_gradient, dtypes[place] = _read_list(shape, dtype, parameters, outputs)
            grads.append(needs_gradient)
            continue
        key = tuple(shape)
        if dtype not in _WIDTHS:
            grads.append(False)
        elif recent := outputs.get(key):
            value = recent[-1]
            if key in taken:
                value = max(reversed(recent), key=lambda output: _WIDTHS[output.dtype])
            taken.add(key)
            grads.append(any(output.needs_gradient for output in recent))
            if changes:
                dtypes[place] = value.dtype
        else:  # without the model's shapes: what nothing computed and is not the first argument
            grads.append(place > 0 if parameters is None else key in parameters)
        width = call.widths[place] if place < len(call.widths) else 0
        grads[-1] = grads[-1] or width > 0  # the graph has an edge to what made it
        if changes and dtype == _FULL and width and uses_autocast(mode):
            dtypes[place] = _NARROW[precision_of(mode)] if width == NARROW else _FULL
    marks = "".join("1" if grad else "0" for grad in reversed(grads))
    return _operator_call(call, dtypes, marks, mode)


def _operator_call(call: TracedCall, dtypes: Sequence[str], grads: str, mode: str) -> OperatorCall:
    return OperatorCall(
        name=call.name,
        shapes=_text(call.shapes),
        strides=_text(call.strides),
        dtypes=_text(dtypes),
        concrete=_text(call.concrete),
        grads=grads,
        mode=mode,
    )


def _read_list(
    shapes: Sequence[Sequence[int]],
    dtype: str,
    parameters: Collection[Shape] | None,
    outputs: dict[Shape, deque[Output]],
) -> tuple[bool, str]:
    """Whether tensors of a list need a gradient: computed ones as their last output, others as
    parameters. And the list's dtype, which a trace does not say: the widest of the last outputs."""
    computed = [recent for shape in shapes if (recent := outputs.get(tuple(shape)))]
    needs_gradient = parameters is None or {tuple(shape) for shape in shapes} <= set(parameters)
    if computed:
        needs_gradient = any(output.needs_gradient for recent in computed for output in recent)
    last = (recent[-1].dtype for recent in computed)
    widest = max(last, key=lambda name: _WIDTHS[name], default="float")
    return needs_gradient, dtype if widest == "float" else f"{dtype}[{widest}]"


def _text(entries: Sequence[object]) -> str:
    return json.dumps(list(entries), separators=(",", ":")) if entries else ""
