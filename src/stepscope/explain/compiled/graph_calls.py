"""The calls of compiled graphs in a trace: which graph, in which region, and when it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.flops.compiled_regions import REGION
from stepscope.explain.work import rows_named
from stepscope.records.lazy_pattern import lazy_pattern
from stepscope.records.trace import ABSENT, DeviceKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.explain.arrays import Bools, Indices, Int32s, Int64s
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.records.trace import Trace

DYNAMO_REGION = lazy_pattern(r"^Torch-Compiled Region: (\d+/\d+)")
_FORWARD, _BACKWARD = "CompiledFunction", "CompiledFunctionBackward"


class GraphCalls(msgspec.Struct, frozen=True, kw_only=True):
    """One row per call, in the order of time."""

    rows: Indices  # host rows
    start_ns: Int64s  # on the host
    end_ns: Int64s
    region: Int32s  # host row of dynamo's region around it; -1 in backward
    backward: Bools
    forward: Int32s  # in backward: index of the call whose backward this is; -1: not known
    first_ns: Int64s  # the device computes for it from here
    last_ns: Int64s  # to here; on the CPU both are the host's
    busy_ns: Int64s

    def __len__(self) -> int:
        return len(self.rows)


def find_graph_calls(analysis: RankAnalysis) -> GraphCalls:
    """Those in the steady steps."""
    return _find_calls(analysis, analysis.steady_steps.holds(analysis.trace.host.start_ns))


def find_all_graph_calls(analysis: RankAnalysis) -> GraphCalls:
    """Those of the whole trace."""
    return _find_calls(analysis, np.ones(len(analysis.trace.host), np.bool_))


def _find_calls(analysis: RankAnalysis, among: Bools) -> GraphCalls:
    """Inductor marks each call; older versions only show autograd's function around it."""
    trace, host = analysis.trace, analysis.trace.host
    calls = _named(trace, lambda name: REGION.match(name) is not None)
    if not calls.any():
        calls = _named(trace, lambda name: name in (_FORWARD, _BACKWARD))
    calls &= among
    rows = np.flatnonzero(calls)
    rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
    regions = _named(trace, lambda name: DYNAMO_REGION.match(name) is not None)
    start, end = host.start_ns[rows], host.start_ns[rows] + host.dur_ns[rows]
    first, last, busy = start, end, host.dur_ns[rows]
    if not analysis.work.on_host:
        first, last, busy = _on_device(trace, calls, rows)
    return GraphCalls(
        rows=rows,
        start_ns=start,
        end_ns=end,
        region=nearest_of(host, regions, rows),
        backward=nearest_of(host, _named(trace, _BACKWARD.__eq__), rows) >= 0,
        forward=_forward_calls(trace, rows),
        first_ns=first,
        last_ns=last,
        busy_ns=busy,
    )


def _named(trace: Trace, matches: Callable[[str], object]) -> Bools:
    everywhere = np.ones(len(trace.host), np.bool_)
    return rows_named(trace, trace.host, everywhere, matches)


def _on_device(trace: Trace, calls: Bools, rows: Indices) -> tuple[Int64s, Int64s, Int64s]:
    """First start, last end and sum of the kernels that each call launched; -1 without any."""
    device = trace.device
    work = np.flatnonzero(device.kind <= DeviceKind.MEMSET)
    call = nearest_of(trace.host, calls, device.launch[work])
    work, call = work[call >= 0], call[call >= 0]
    never = np.iinfo(np.int64)
    first = np.full(len(trace.host), never.max, np.int64)
    last = np.full(len(trace.host), ABSENT, np.int64)
    busy = np.zeros(len(trace.host), np.int64)
    np.minimum.at(first, call, device.start_ns[work])
    np.maximum.at(last, call, device.start_ns[work] + device.dur_ns[work])
    np.add.at(busy, call, device.dur_ns[work])
    first[last < 0] = ABSENT
    return first[rows], last[rows], busy[rows]


def _forward_calls(trace: Trace, rows: Indices) -> Int32s:
    """By autograd's links from a backward function to its forward one."""
    host = trace.host
    forward = _named(trace, _FORWARD.__eq__)
    backward = _named(trace, _BACKWARD.__eq__)
    index = np.full(len(host), ABSENT, np.int32)
    around = nearest_of(host, forward, rows)
    inside = np.flatnonzero(around >= 0)
    index[around[inside]] = inside
    function = nearest_of(host, backward, rows)
    linked = np.where(function >= 0, host.forward_of[np.maximum(function, 0)], ABSENT)
    return np.where(linked >= 0, index[np.maximum(linked, 0)], ABSENT).astype(np.int32)
