"""The forward calls of a step, and the time that each of them takes in both passes.

A framework's call is an outermost operator of the forward pass. Autograd's nodes of the backward
pass belong to the call that created them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.explain.recurrences import forward_creators
from stepscope.explain.replay.build import call_phases, outermost_operator
from stepscope.explain.replay.graph import Phase
from stepscope.records.trace import HostKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.replay.graph import Flags, Floats, Ints
    from stepscope.predict.step_context import StepContext
    from stepscope.records.trace import Trace


class ForwardCall(msgspec.Struct, frozen=True, kw_only=True):
    """Lists have one entry per argument; a list of tensors has a list of shapes."""

    name: str
    shapes: tuple[Any, ...]
    strides: tuple[Any, ...]  # empty if the trace does not say
    dtypes: tuple[str, ...]
    concrete: tuple[str, ...]


class StepForward(msgspec.Struct, frozen=True, kw_only=True):
    """Items are the calls of a CPU step's graph, or the tasks of a device's."""

    calls: tuple[ForwardCall, ...]  # in order of their start
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


def find_forward_calls(context: StepContext) -> StepForward:
    """Empty if the trace has no operators or no shapes."""
    trace, graph = context.trace, context.graph
    item_call, item_ns = graph.tasks.call, graph.tasks.dur_ns
    if context.on_host:
        item_call, item_ns = np.arange(len(graph.calls), dtype=np.int32), graph.calls.call_ns
    top = graph.calls.operator[item_call] if len(graph.calls) else np.zeros(0, np.int32)
    rows = _forward_rows(context)
    number = np.full(len(trace.host) + 1, -1, np.int32)  # row -1 reads the last place
    number[rows] = np.arange(len(rows), dtype=np.int32)
    forward = number[top]
    created_by = number[forward_creators(trace, top)]
    return StepForward(
        calls=tuple(_read_calls(trace, rows)),
        owner=np.where(forward >= 0, forward, created_by).astype(np.int32),
        in_backward=forward < 0,
        item_ns=item_ns,
    )


def _forward_rows(context: StepContext) -> NDArray[np.intp]:
    """Outermost operators of the step's forward pass, also those that launch nothing."""
    host, calls = context.trace.host, context.graph.calls
    known = calls.row[calls.row >= 0]
    known = known[host.kind[known] <= HostKind.RUNTIME] if len(known) else known
    if not len(known):
        return np.zeros(0, np.intp)
    first, last = host.start_ns[known].min(), host.start_ns[known].max()
    # A CPU's first call is the operator itself; a device's first launch is inside its operator.
    starts_inside = (host.start_ns <= last) & (host.start_ns + host.dur_ns >= first)
    candidates = np.flatnonzero(
        (host.kind == HostKind.OPERATOR) & (host.shapes >= 0) & starts_inside
    )
    outer = candidates[outermost_operator(context.trace, candidates) == candidates]
    outer = outer[call_phases(context.trace, outer) == Phase.FORWARD]
    ordered: NDArray[np.intp] = outer[np.argsort(host.start_ns[outer], kind="stable")]
    return ordered


def _read_calls(trace: Trace, rows: NDArray[np.intp]) -> list[ForwardCall]:
    host = trace.host
    columns = (host.name, host.shapes, host.strides, host.dtypes, host.concrete)
    keys = list(zip(*(column[rows].tolist() for column in columns), strict=True))
    known = {key: _read_call(trace.strings, *key) for key in dict.fromkeys(keys)}
    return [known[key] for key in keys]


def _read_call(
    strings: tuple[str, ...], name: int, shapes: int, strides: int, dtypes: int, concrete: int
) -> ForwardCall:
    def entries(code: int) -> tuple[Any, ...]:
        return tuple(msgspec.json.decode(strings[code])) if code >= 0 else ()

    return ForwardCall(
        name=strings[name],
        shapes=entries(shapes),
        strides=entries(strides),
        dtypes=entries(dtypes),
        concrete=entries(concrete),
    )
