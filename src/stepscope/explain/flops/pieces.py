"""The device's work in pieces, each with the operator that answers for it.

A piece is a device event; where the CPU is the device, the time an operator spends in itself.
Communication is left out, as are copies from and to the host: no roof of the device holds for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.call_tree import children_sum, enclosing
from stepscope.explain.steps import step_of
from stepscope.explain.work import Kind, comm_spans, rows_named
from stepscope.records.trace import DeviceKind, HostKind
from stepscope.trace.links import distinct, nearest, nearest_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.flops.costs import Costs
    from stepscope.explain.work import Work
    from stepscope.records.explanation import Steps
    from stepscope.records.trace import Trace


class Pieces(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of those in the steady steps; amounts of one step are sums / `steps`."""

    steps: int
    devices: int  # that computed
    operator: NDArray[np.int32]  # host row, or -1
    name: NDArray[np.int32]  # string code: of the kernel, or of the operator on the CPU
    dur_ns: NDArray[np.int64]
    compute: NDArray[np.bool_]  # a kernel, and not a copy or memset
    replayed: NDArray[np.bool_]  # by a CUDA graph, and joined to the operator of its recording
    call_part: NDArray[np.float64]  # of a replayed one: the part of one call of its operator

    def __len__(self) -> int:
        return len(self.dur_ns)


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that amounts are averaged over."""

    steps: Steps
    first: int
    count: int

    def holds(self, times: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether host times fall into them; without steps, all do."""
        if not self.steps.steps:
            return np.ones(len(times), np.bool_)
        which = step_of(self.steps.steps, times)
        return (which >= self.first) & (which < self.first + self.count)


def choose(steps: Steps) -> Chosen:
    """Those that the cycles cover, else all that are marked, else the window as one."""
    if steps.cycles_ns:
        return Chosen(steps=steps, first=steps.first_cycle, count=len(steps.cycles_ns))
    return Chosen(steps=steps, first=0, count=max(1, len(steps.steps)))


def cut(trace: Trace, work: Work, costs: Costs, chosen: Chosen) -> Pieces:
    if work.on_host:
        return _of_host(trace, costs, chosen)
    return _of_device(trace, work, costs, chosen)


def _of_device(trace: Trace, work: Work, costs: Costs, chosen: Chosen) -> Pieces:
    device, rows = trace.device, work.rows
    launch = device.launch[rows]
    linked = launch >= 0
    inside = linked.copy()
    inside[linked] = chosen.holds(trace.host.start_ns[launch[linked]])
    start, end = chosen.steps.window_start_ns, chosen.steps.window_end_ns
    inside |= ~linked & (work.start_ns >= start) & (work.start_ns < end)
    to_host = rows_named(trace, device, device.kind == DeviceKind.MEMCPY, _leaves_device)
    inside &= (work.kind != Kind.COMM) & ~to_host[rows]
    kept, compute = rows[inside], work.kind[inside] == Kind.COMPUTE
    return Pieces(
        steps=chosen.count,
        devices=max(1, len(distinct(device.device[kept[compute]]))),
        operator=costs.operator[kept],
        name=device.name[kept],
        dur_ns=device.dur_ns[kept],
        compute=compute,
        replayed=costs.replayed[kept],
        call_part=costs.call_part[kept],
    )


def _leaves_device(name: str) -> bool:
    return "DtoD" not in name and "Device -> Device" not in name


def _of_host(trace: Trace, costs: Costs, chosen: Chosen) -> Pieces:
    host = trace.host
    rows = np.flatnonzero(host.kind == HostKind.OPERATOR)
    own = host.dur_ns[rows] - children_sum(enclosing(host, rows), host.dur_ns[rows])
    inside = chosen.holds(host.start_ns[rows]) & (own > 0)
    inside &= nearest(host, comm_spans(trace))[rows] < 0
    kept = rows[inside]
    answer = nearest_of(host, costs.answering, kept)
    return Pieces(
        steps=chosen.count,
        devices=1,
        operator=np.where(answer >= 0, answer, kept).astype(np.int32),
        name=host.name[kept],
        dur_ns=own[inside],
        compute=np.ones(len(kept), np.bool_),
        replayed=np.zeros(len(kept), np.bool_),
        call_part=np.zeros(len(kept)),
    )
