"""Training steps inside of CUDA graphs.

A graph that recorded an optimizer's step trains whenever it is replayed: each replay ends a step.
While it is captured nothing trains, so an optimizer that steps then ends none.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from stepscope.measure.after_import import when_imported
from stepscope.measure.attached import replace
from stepscope.measure.dynamo import surrounds
from stepscope.measure.never_raise import never_raise, note

if TYPE_CHECKING:
    from stepscope.measure.session import Session

_CALLS = "_stepscope_calls"  # attributes of a graph: optimizers' steps before its capture,
_TRAINS = "_stepscope_trains"  # and whether it recorded one
_METHODS = ("capture_begin", "capture_end", "replay")


def watch_graph_steps(session: Session) -> None:
    when_imported("torch.cuda.graphs", functools.partial(_watch, session))


def _watch(session: Session, module: Any) -> None:
    graph: Any = getattr(module, "CUDAGraph", None)
    if any(getattr(graph, name, None) is None for name in _METHODS):
        note("graph steps", "this version of torch replays graphs in another way")
        return
    begin, end, again = (getattr(graph, name) for name in _METHODS)

    @surrounds
    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        _begins(session, self)
        return begin(self, *args, **kwargs)

    @surrounds
    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            _ends(session, self)

    @surrounds
    @functools.wraps(again)
    def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = again(self, *args, **kwargs)
        if getattr(self, _TRAINS, False):
            session.step_was_seen()
        return result

    for name, replacement in zip(_METHODS, (capture_begin, capture_end, replay), strict=True):
        replace(graph, name, replacement)


@never_raise
def _begins(session: Session, graph: Any) -> None:
    session.optimizers.capturing = True
    setattr(graph, _CALLS, session.optimizers.calls)


@never_raise
def _ends(session: Session, graph: Any) -> None:
    session.optimizers.capturing = False
    setattr(graph, _TRAINS, session.optimizers.calls > getattr(graph, _CALLS))
