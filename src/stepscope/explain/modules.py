"""Time by nn.Module, where Python stacks were recorded: forward as called, backward as linked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.call_tree import children_sum, enclosing, group, outermost, sum_by
from stepscope.explain.work import rows_named
from stepscope.records.explanation import Module
from stepscope.records.trace import HostKind

if TYPE_CHECKING:
    from stepscope.explain.device_time import DeviceTime
    from stepscope.records.trace import Trace

PREFIX = "nn.Module: "


def list_modules(trace: Trace, device: DeviceTime) -> tuple[Module, ...]:
    """Longest device time (or, on the CPU, host time) first."""
    host = trace.host
    python = host.kind == HostKind.PYTHON
    rows = np.flatnonzero(rows_named(trace, host, python, lambda s: s.startswith(PREFIX)))
    if not len(rows):
        return ()
    above = enclosing(host, rows)
    own = host.dur_ns[rows] - children_sum(above, host.dur_ns[rows])
    outer = outermost(above, host.name[rows])
    first, inverse, count = group(host.name[rows])
    calls = np.bincount(inverse, minlength=count)
    total = sum_by(inverse, np.where(outer, host.dur_ns[rows], 0), count)
    forward = sum_by(inverse, np.where(outer, device.inclusive[rows], 0), count)
    backward = sum_by(inverse, np.where(outer, device.backward[rows], 0), count)
    own_total = sum_by(inverse, own, count)
    return tuple(
        Module(
            name=trace.strings[host.name[rows[first[i]]]].removeprefix(PREFIX),
            calls=int(calls[i]),
            host_total_ns=int(total[i]),
            host_self_ns=int(own_total[i]),
            forward_device_ns=int(forward[i]),
            backward_device_ns=int(backward[i]),
        )
        for i in np.lexsort((-total, -(forward + backward))).tolist()
    )
