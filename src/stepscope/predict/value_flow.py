"""Which dtype each input of a step's calls would have in another precision.

A trace has shapes but no tensors. So an input is taken to be the last output of its shape; where
one call has several inputs of a shape, the others are the widest of the last few: a sum joins what
a product returned with a residual stream that may be wider.
"""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING

from stepscope.records.operator_times import OperatorCall

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from stepscope.predict.forward_calls import ForwardCall
    from stepscope.records.operator_times import Output

    Describe = Callable[[OperatorCall], Sequence[Output] | None]
    Shape = tuple[int, ...]

_WIDTHS = {"double": 3, "float": 2, "c10::Half": 1, "c10::BFloat16": 1}
_REMEMBERED = 6  # outputs of a shape


def follow_values(
    calls: Sequence[ForwardCall],
    parameters: Collection[Shape] | None,
    mode: str,
    describe: Describe,
) -> list[OperatorCall]:
    """The calls as they would be made in a mode. `describe` gives a call's outputs, None if they
    are not known; `parameters` are the model's shapes, None if they are not known."""
    outputs: dict[Shape, deque[Output]] = {}
    made = []
    for call in calls:
        wanted = _as_made(call, parameters, mode, outputs)
        made.append(wanted)
        for output in describe(wanted) or ():
            if output.dtype in _WIDTHS:
                recent = outputs.setdefault(tuple(output.shape), deque(maxlen=_REMEMBERED))
                recent.append(output)
    return made


def _as_made(
    call: ForwardCall,
    parameters: Collection[Shape] | None,
    mode: str,
    outputs: dict[Shape, deque[Output]],
) -> OperatorCall:
    dtypes, grads = list(call.dtypes), []
    taken: set[Shape] = set()
    for place in reversed(range(len(call.shapes))):
        shape, dtype = call.shapes[place], dtypes[place] if place < len(dtypes) else ""
        if shape and isinstance(shape[0], list):
            grads.append(parameters is None or set(map(tuple, shape)) <= set(parameters))
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
            if mode:
                dtypes[place] = value.dtype
        else:
            grads.append(_is_parameter(key, place, parameters))
    return OperatorCall(
        name=call.name,
        shapes=_text(call.shapes),
        strides=_text(call.strides),
        dtypes=_text(dtypes),
        concrete=_text(call.concrete),
        grads="".join("1" if grad else "0" for grad in reversed(grads)),
        mode=mode,
    )


def _is_parameter(shape: Shape, place: int, parameters: Collection[Shape] | None) -> bool:
    """Without the model's shapes: what nothing computed and is not the first argument."""
    return place > 0 if parameters is None else shape in parameters


def _text(entries: Sequence[object]) -> str:
    return json.dumps(list(entries), separators=(",", ":")) if entries else ""
