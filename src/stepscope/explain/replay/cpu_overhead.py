"""The profiler's cost on a CPU: a fixed amount for every operator and Python function.

On a CPU operators are long and their own time is real work, so no one factor fits all; recording
costs the same for each event. Operators that only call another show how much (see
overhead.find_slowness): an event costs 1.8 µs when those take as long as usual, with shapes or
without, and otherwise in proportion. Fitted to five models (two MLPs, a convolution net, a
transformer, an LSTM) timed with and without the profiler; the table is in
docs/records/predictions.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.graph import CallKind
from stepscope.records.trace import DeviceKind, HostKind
from stepscope.trace.links import distinct

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.replay.graph import StepGraph
    from stepscope.records.trace import Trace

OPERATOR_NS = 1_800.0
FRAME_NS = 1_500.0
# Assumed if the trace does not show it: recording shapes slows such operators down.
_SLOWNESS = {True: 1.3, False: 0.82}
_SPREAD, _SPREAD_UNKNOWN = 0.22, 0.4  # of the cost, one standard deviation
_MOST = 0.8  # of a call's or a gap's time


def runs_on_host(trace: Trace) -> bool:
    """The CPU is the device: no kernel, copy or memset was recorded."""
    return not bool((trace.device.kind <= DeviceKind.MEMSET).any())


def event_cost_ns(trace: Trace, slowness: float | None) -> float:
    """What recording one operator cost."""
    return _slow(trace, slowness) * OPERATOR_NS


def _slow(trace: Trace, slowness: float | None) -> float:
    return slowness or _SLOWNESS[bool(trace.facts.get("record_shapes", True))]


def without_profiler_on_cpu(
    graph: StepGraph, trace: Trace, slowness: float | None
) -> tuple[StepGraph, float]:
    """The step without the recording's cost, and the spread of the log of the host's time."""
    slow = _slow(trace, slowness)
    calls = graph.calls
    if not len(calls):
        return graph, 0.0
    operators, frames = (
        _events_of(trace, graph, kind) for kind in (HostKind.OPERATOR, HostKind.PYTHON)
    )
    cost = slow * (OPERATOR_NS * operators + FRAME_NS * frames)
    own = np.minimum(cost, _MOST * calls.call_ns)
    before = np.minimum(cost - own, _MOST * calls.gap_ns)
    call_ns, gap_ns, none = calls.call_ns - own, calls.gap_ns - before, np.zeros(len(calls))
    lighter = replace(graph, calls=replace(calls, call_ns=call_ns, gap_ns=gap_ns, frames=none))
    spread = _SPREAD if slowness else _SPREAD_UNKNOWN
    taken = float(own.sum() + before.sum())
    return lighter, spread * taken / max(lighter.host_ns, 1.0)


def _events_of(trace: Trace, graph: StepGraph, kind: HostKind) -> NDArray[np.float64]:
    """Events that began between each call and the next; inside it for the last call."""
    host, calls = trace.host, graph.calls
    real = np.flatnonzero((calls.row >= 0) & (calls.kind != CallKind.WAIT))
    out = np.zeros(len(calls))
    if not len(real):
        return out
    rows = calls.row[real]
    start = host.start_ns[rows]
    last = start[-1] + host.dur_ns[rows[-1]]
    chosen = (host.kind == kind) & np.isin(host.thread, distinct(host.thread[rows]))
    begun = np.sort(host.start_ns[chosen])
    place = np.searchsorted(begun, np.append(start, last))
    out[real] = np.diff(place)
    return out
