"""What follows from the texts of a trace, worked out once per distinct text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from stepscope.explain.call_tree import distinct_places

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from stepscope.records.trace import Trace

_T = TypeVar("_T", bool, float)


def by_text(
    trace: Trace,
    column: NDArray[np.int32],
    rows: NDArray[np.integer[Any]],
    value_of: Callable[[str], _T],
    absent: _T,
) -> NDArray[Any]:
    """`value_of` the text that each row has in a column; `absent` without a row or a text."""
    if not len(column):
        return np.full(len(rows), absent)
    codes, place = distinct_places(np.where(rows >= 0, column[np.maximum(rows, 0)], -1))
    values = [value_of(trace.strings[code]) if code >= 0 else absent for code in codes.tolist()]
    return np.array(values, type(absent))[place]


def tensor_shapes(text: str) -> list[tuple[int, ...]]:
    """Of an operator's arguments, without lists of tensors."""
    arguments = msgspec.json.decode(text)
    return [tuple(dims) for dims in arguments if not dims or isinstance(dims[0], int)]


def is_channels_last(strides: str) -> bool:
    """By the first tensor of a convolution: its input or, in backward, its output's gradient."""
    first = next((steps for steps in tensor_shapes(strides) if len(steps) >= 3), ())
    return len(first) >= 3 and first[1] == 1 and first[2] > 1
