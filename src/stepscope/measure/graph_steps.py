"""Training steps inside of CUDA graphs.

A graph that recorded an optimizer's step trains whenever it is replayed: each replay ends a step.
While it is captured nothing trains, so an optimizer that steps then ends none. capture_gate.py is
told of every capture.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from stepscope.measure.after_import import when_imported
from stepscope.measure.attached import replace
from stepscope.measure.capture_gate import gate
from stepscope.measure.dynamo import surrounds
from stepscope.measure.never_raise import never_raise, note

if TYPE_CHECKING:
    from stepscope.measure.session import Session

_CALLS = "_stepscope_calls"  # attributes of a graph: optimizers' steps before its capture,
_TRAINS = "_stepscope_trains"  # and whether it recorded one
_METHODS = ("capture_begin", "capture_end", "replay")
_MAKER = "make_graphed_callables"


class _Preparation:
    """A call of make_graphed_callables."""


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
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            gate.end(self)
            raise

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
    _watch_maker(module)


@never_raise
def _watch_maker(module: Any) -> None:
    """It runs passes before it captures, which train nothing."""
    original = getattr(module, _MAKER, None)
    if original is None:
        return

    @surrounds
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        call = _Preparation()
        gate.begin(call)
        try:
            return original(*args, **kwargs)
        finally:
            gate.end(call)

    for owner in (module, sys.modules.get(module.__name__.rpartition(".")[0])):
        if getattr(owner, _MAKER, None) is original:
            replace(owner, _MAKER, make)


@never_raise
def _begins(session: Session, graph: Any) -> None:
    gate.begin(graph)
    setattr(graph, _CALLS, session.optimizers.calls)


@never_raise
def _ends(session: Session, graph: Any) -> None:
    gate.end(graph)
    setattr(graph, _TRAINS, session.optimizers.calls > getattr(graph, _CALLS))
