"""Which dtype each input of a step's calls would have in another precision.

A trace has shapes but no tensors. Where the captured graph says what an operator reads, the rules
of autocast decide (autocast_inputs.py). Else an input is taken to be the last output of its shape;
where one call has several inputs of a shape, the others are the widest of the last few: a sum joins
what a product returned with a residual stream that may be wider.
"""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING

from stepscope.predict.peak_memory.autocast_widths import NARROW
from stepscope.records.operator_times import OperatorCall
from stepscope.records.probe_modes import precision_of, uses_autocast

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from stepscope.predict.step_operators import TracedCall
    from stepscope.records.operator_times import Output

    Describe = Callable[[OperatorCall], Sequence[Output] | None]
    Shape = tuple[int, ...]

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
        if not call.in_forward:
            made.append(_alone(call))
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
            grads.append(_needs_gradient(shape, parameters, outputs))
            dtypes[place] = _list_dtype(dtype, shape, outputs)
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
        else:
            grads.append(_is_parameter(key, place, parameters))
        width = call.widths[place] if place < len(call.widths) else 0
        grads[-1] = grads[-1] or width > 0  # the graph has an edge to what made it
        if changes and dtype == _FULL and width:
            dtypes[place] = _under_autocast(mode, width) or dtypes[place]
    marks = "".join("1" if grad else "0" for grad in reversed(grads))
    return _operator_call(call, dtypes, marks, mode)


def _under_autocast(mode: str, width: int) -> str | None:
    """None if it is not known, or this mode is not autocast's."""
    if not width or not uses_autocast(mode):
        return None
    return _NARROW[precision_of(mode)] if width == NARROW else _FULL


def _alone(call: TracedCall) -> OperatorCall:
    """The optimizer and autograd's own operators run as recorded, in any precision."""
    return _operator_call(call, call.dtypes, "0" * len(call.shapes), "")


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


def _needs_gradient(
    shapes: Sequence[Sequence[int]],
    parameters: Collection[Shape] | None,
    outputs: dict[Shape, deque[Output]],
) -> bool:
    """Whether tensors of a list do: computed ones as their last output, others as parameters."""
    recent = [output for shape in shapes for output in outputs.get(tuple(shape), ())]
    if recent:
        return any(output.needs_gradient for output in recent)
    return parameters is None or {tuple(shape) for shape in shapes} <= set(parameters)


def _list_dtype(
    dtype: str, shapes: Sequence[Sequence[int]], outputs: dict[Shape, deque[Output]]
) -> str:
    """A trace does not say the dtype of a list's tensors: the widest of their last outputs."""
    last = [recent[-1].dtype for shape in shapes if (recent := outputs.get(tuple(shape)))]
    widest = max(last, key=lambda name: _WIDTHS[name], default="float")
    return dtype if widest == "float" else f"{dtype}[{widest}]"


def _is_parameter(shape: Shape, place: int, parameters: Collection[Shape] | None) -> bool:
    """Without the model's shapes: what nothing computed and is not the first argument."""
    return place > 0 if parameters is None else shape in parameters


def _text(entries: Sequence[object]) -> str:
    return json.dumps(list(entries), separators=(",", ":")) if entries else ""
