"""A closure that is given to an optimizer holds the step's forward and backward."""

from __future__ import annotations

import functools
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from stepscope.measure.dynamo import surrounds
from stepscope.measure.step_notes import ENTER, LEAVE
from stepscope.measure.window import CLOSURE

if TYPE_CHECKING:
    from collections import deque

    from stepscope.measure.profiler_windows import ProfilerWindows
    from stepscope.measure.step_notes import Note


def timed_closure(closure: Any, notes: deque[Note], windows: ProfilerWindows) -> Any:
    """The closure, with its time noted as forward: it is not the optimizer's."""

    @surrounds
    @functools.wraps(closure)
    def timed(*args: Any, **kwargs: Any) -> Any:
        window = windows.running
        mark = window.mark(CLOSURE) if window is not None else None
        notes.append((ENTER, perf_counter_ns(), "forward"))
        try:
            return closure(*args, **kwargs)
        finally:
            notes.append((LEAVE, perf_counter_ns(), "forward"))
            if mark is not None:
                mark.__exit__(None, None, None)

    return timed
