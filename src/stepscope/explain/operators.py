"""Host and device time by operator and input shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.call_tree import children_sum, enclosing, group, outermost, sum_by
from stepscope.records.explanation import Operator
from stepscope.records.trace import HostKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from stepscope.explain.arrays import Bools, Int64s
    from stepscope.explain.device_time import DeviceTime
    from stepscope.records.trace import HostEvents, Trace

# More distinct (operator, shapes) rows than this are of no use to a reader.
MOST_ROWS = 1000


def list_operators(trace: Trace, device: DeviceTime) -> tuple[Operator, ...]:
    """Longest device time first, then longest own host time."""
    host = trace.host
    is_operator = host.kind == HostKind.OPERATOR
    rows = np.flatnonzero(is_operator & (device.calls > 0))
    if not len(rows):
        return ()
    above = enclosing(host, rows)
    own_host = host.dur_ns[rows] - children_sum(above, host.dur_ns[rows])
    own_device = _own_device(host, is_operator, device.direct)[rows]
    first, inverse, count = group(host.name[rows], host.shapes[rows], host.dtypes[rows])
    outer = outermost(above, inverse)
    calls = np.rint(np.bincount(inverse, weights=device.calls[rows], minlength=count)).astype(int)
    host_total = sum_by(inverse, np.where(outer, host.dur_ns[rows], 0), count)
    host_self = sum_by(inverse, own_host, count)
    device_total = sum_by(inverse, np.where(outer, device.inclusive[rows], 0), count)
    device_self = sum_by(inverse, own_device, count)
    order = np.lexsort((-host_self, -device_self))[:MOST_ROWS]
    sample = rows[first[order]]
    texts = (host.name, host.shapes, host.dtypes)
    sums = (calls, host_total, host_self, device_total, device_self)
    columns = [column[sample] for column in texts] + [column[order] for column in sums]
    return tuple(
        Operator(
            name=trace.strings[name],
            shapes=trace.strings[shapes] if shapes >= 0 else "",
            dtypes=trace.strings[dtypes] if dtypes >= 0 else "",
            calls=count,
            host_total_ns=in_all,
            host_self_ns=own,
            device_total_ns=on_device,
            device_self_ns=own_on_device,
        )
        for name, shapes, dtypes, count, in_all, own, on_device, own_on_device in zip(
            *(column.tolist() for column in columns), strict=True
        )
    )


def _own_device(host: HostEvents, is_operator: Bools, direct: Int64s) -> Int64s:
    """Per host row, device time of launches whose innermost operator it is."""
    total = np.zeros(len(host), np.int64)
    launching = np.flatnonzero(direct > 0)
    near = nearest_of(host, is_operator, launching)
    np.add.at(total, near[near >= 0], direct[launching[near >= 0]])
    return total
