"""What a step computes without gradients before its training pass: games against itself, a teacher.

Autocast begins with the first call of the model that backward follows, and ends where backward
begins. Work under `torch.no_grad()` that comes first stays as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.replay.graph import Phase

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.replay.graph import Flags
    from stepscope.predict.step_context import StepContext


def find_before_training(context: StepContext) -> Flags:
    """Tasks of operators without gradients, if no operator that backward follows came before them
    since the last backward pass. None if the trace does not link the two passes."""
    host, rows = context.trace.host, context.operators.row
    linked = np.zeros(len(host), np.bool_)
    linked[host.forward_of[host.forward_of >= 0]] = True
    if not linked.any():
        return np.zeros(len(rows), np.bool_)
    forward = (context.task_phase == Phase.FORWARD) & (rows >= 0)
    at = np.maximum(rows, 0)
    # PyTorch numbers operators for autograd only while gradients are enabled.
    with_gradients = _or_around(host.sequence >= 0, host.parent)[at]
    trains = forward & _or_around(linked, host.parent)[at]
    backward = context.task_phase == Phase.BACKWARD
    since_backward = _last(trains) <= _last(backward)
    found: Flags = forward & ~with_gradients & since_backward
    return found


def _or_around(flags: Flags, parent: NDArray[np.int32]) -> Flags:
    """Whether an event or any event around it has the flag."""
    while True:
        around = flags | np.where(parent >= 0, flags[np.maximum(parent, 0)], False)
        if np.array_equal(around, flags):
            return flags
        flags = around


def _last(flags: Flags) -> NDArray[np.intp]:
    """For each task, the place of the last one up to it that has the flag, or -1."""
    places: NDArray[np.intp] = np.maximum.accumulate(np.where(flags, np.arange(len(flags)), -1))
    return places
