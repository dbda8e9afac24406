"""Which of the device's work CUDA graphs launched, and how much of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.work import named, one_of
from stepscope.records.trace import DeviceKind
from stepscope.trace.links import is_among

if TYPE_CHECKING:
    from stepscope.explain.arrays import Bools, Int64s
    from stepscope.records.trace import Trace

is_graph_launch = one_of("graphlaunch")
MOSTLY = 0.5  # of the device's time: such a step is that of its graphs


def find_replayed(trace: Trace) -> Bools:
    """Per device event: a graph launch started it.

    The launches of the window's first replays were often not recorded. Their kernels still have
    the number of a graph's node, or share the number of their launch: other launches start one.
    """
    device = trace.device
    linked = device.launch >= 0
    names = trace.host.name[np.maximum(device.launch, 0)] if linked.any() else device.name
    replayed = named(trace, names, linked, is_graph_launch)
    work = device.kind <= DeviceKind.MEMSET
    lost = np.flatnonzero(work & ~linked & (device.correlation > 0))
    if len(lost):
        _, which, count = np.unique(
            device.correlation[lost], return_inverse=True, return_counts=True
        )
        replayed[lost] = count[which.reshape(-1)] > 1
    replayed |= work & (device.graph_node > 0)
    return replayed


def replayed_share(trace: Trace) -> float:
    """Of the device's time, the part that graphs launched."""
    device = trace.device
    whole = int(device.dur_ns[device.kind <= DeviceKind.MEMSET].sum())
    return int(device.dur_ns[find_replayed(trace)].sum()) / whole if whole else 0.0


def find_gaps_in_replays(trace: Trace, end_ns: Int64s) -> Bools:
    """Gaps, by their ends, before a graph's kernel that is not its first: no launch fills them."""
    device = trace.device
    rows = np.flatnonzero(find_replayed(trace))
    if not len(rows):
        return np.zeros(len(end_ns), np.bool_)
    start = device.start_ns[rows]
    replays, which = np.unique(device.correlation[rows], return_inverse=True)
    first = np.full(len(replays), np.iinfo(np.int64).max)
    np.minimum.at(first, which.reshape(-1), start)
    return is_among(end_ns, start[start > first[which.reshape(-1)]])
