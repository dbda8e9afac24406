"""Device time per host call: what it launched, what calls inside it launched, and for a forward
operator what its backward launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.call_tree import Levels
from stepscope.explain.graph_recordings import find_recorded
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from stepscope.explain.arrays import Floats, Int64s
    from stepscope.explain.flops import Costs
    from stepscope.explain.work import Work
    from stepscope.records.trace import Trace


class DeviceTime(msgspec.Struct, frozen=True, kw_only=True):
    """Per host row, in ns."""

    direct: Int64s  # launched by exactly this call
    inclusive: Int64s  # launched by it or by anything inside it
    backward: Int64s  # launched by the backward of it or of anything inside it
    calls: Floats  # one, and those that CUDA graphs replay; a graph's recording is none


def sum_device_time(trace: Trace, work: Work, costs: Costs | None = None) -> DeviceTime:
    """Sum device durations onto host rows; all zero when the CPU is the device.

    What a CUDA graph replays counts for the operator that it was joined to, not for its launch.
    """
    host = trace.host
    nothing = np.zeros(len(host), np.int64)
    calls = (~find_recorded(trace)).astype(np.float64)
    if work.on_host or not len(host):
        return DeviceTime(direct=nothing, inclusive=nothing, backward=nothing, calls=calls)
    launch = trace.device.launch[work.rows]
    if costs is not None:
        replayed = costs.replayed[work.rows]
        launch = np.where(replayed, costs.operator[work.rows], launch)
        np.add.at(calls, launch[replayed], costs.call_part[work.rows[replayed]])
    linked = launch >= 0
    direct = nothing.copy()
    np.add.at(direct, launch[linked], trace.device.dur_ns[work.rows[linked]])
    levels = Levels.of(host.parent)
    return DeviceTime(
        direct=direct,
        inclusive=levels.inclusive(direct),
        backward=_sum_backward(trace, direct, levels),
        calls=calls,
    )


def _sum_backward(trace: Trace, direct: Int64s, levels: Levels) -> Int64s:
    host = trace.host
    mine = np.zeros(len(host), np.int64)
    known = host.forward_of >= 0
    if known.any():
        launching = np.flatnonzero(direct > 0)
        backward = nearest_of(host, known, launching)
        inside = backward >= 0
        np.add.at(mine, host.forward_of[backward[inside]], direct[launching[inside]])
        return levels.inclusive(mine)
    return mine
