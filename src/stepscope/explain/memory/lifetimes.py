"""Allocator events of a trace as lifetimes of blocks, and what each block was for.

allocated in                 released                       is
forward                      in backward                    activations
forward                      before backward                temporaries
forward                      after backward, or never       other: the batch, outputs, the loss
backward                     in the same backward           temporaries
backward                     later, or never                gradients
the optimizer's step         in it                          temporaries
the optimizer's step         never                          optimizer
before the window            in zero_grad                   gradients
before the window            in backward                    activations
before the window            elsewhere                      other
before the window            never                          see traced.py
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.optimizer_steps import in_optimizer_step
from stepscope.explain.work import rows_named
from stepscope.records.memory import CATEGORIES
from stepscope.records.trace import ABSENT, HostKind
from stepscope.trace.links import nearest_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.records.trace import Trace

    Int8 = NDArray[np.int8]
    Int32 = NDArray[np.int32]
    Int64 = NDArray[np.int64]

CPU = 0  # c10::DeviceType
BACKWARD = "autograd::engine::evaluate_function"
OPTIMIZER, ZERO_GRAD = "Optimizer.step#", "Optimizer.zero_grad#"
_GRADIENTS, _OPTIMIZER, _ACTIVATIONS, _TEMPORARIES, _OTHER = (
    CATEGORIES.index(name)
    for name in ("gradients", "optimizer", "activations", "temporaries", "other")
)


class MemoryPhase(IntEnum):
    """What the host was doing; forward is everything that is nothing else."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    ZERO_GRAD = 3

    @property
    def label(self) -> str:
        return self.name.lower()


class Lifetimes(msgspec.Struct, frozen=True, kw_only=True):
    """Events of one device in order of time, each joined to its other end."""

    on_cpu: bool
    time_ns: Int64
    size_bytes: Int64  # negative for a release
    allocated_bytes: Int64  # right after the event
    reserved_bytes: Int64
    host: Int32  # the innermost host event around it, or -1
    phase: Int8
    other_end: Int64  # row of its release, or of its allocation; -1 outside the window
    category: Int8  # index into CATEGORIES
    held_before: int  # bytes that the window begins with
    agrees: bool  # the allocator's own totals are the sums of the sizes

    def __len__(self) -> int:
        return len(self.time_ns)

    @property
    def kept_bytes(self) -> int:
        """Bytes that the window began with and never released."""
        before = (self.size_bytes < 0) & (self.other_end < 0)
        return self.held_before + int(self.size_bytes[before].sum())

    def levels(self) -> Int64:
        """Bytes by category right after every event, without what was held all along."""
        out = np.zeros((len(CATEGORIES), len(self)), np.int64)
        before = (self.size_bytes < 0) & (self.other_end < 0)
        for code in range(len(CATEGORIES)):
            chosen = self.category == code
            held = -int(self.size_bytes[chosen & before].sum())
            np.cumsum(np.where(chosen, self.size_bytes, 0), out=out[code])
            out[code] += held
        return out

    def alive_at(self, row: int) -> NDArray[np.intp]:
        """Rows that allocated what is held right after this event."""
        rows = np.arange(len(self))
        released = (self.other_end >= 0) & (self.other_end <= row)
        return np.flatnonzero((self.size_bytes > 0) & (rows <= row) & ~released)


def find_lifetimes(trace: Trace) -> Lifetimes | None:
    """Of the device that held most; None without allocator events."""
    memory = trace.memory
    rows = _one_device(trace)
    if not len(rows):
        return None
    size, allocated = memory.size_bytes[rows], memory.allocated_bytes[rows]
    on_cpu = int(memory.device_type[rows[0]]) == CPU
    host = _around(trace, memory.thread[rows], memory.time_ns[rows])
    phase = _phases(trace, host)
    other_end = _pair(memory.address[rows], size)
    known = bool((allocated >= 0).all())
    if not known:  # then as low as the releases allow
        allocated = np.cumsum(size)
        allocated -= min(0, int(allocated.min()))
    return Lifetimes(
        on_cpu=on_cpu,
        time_ns=memory.time_ns[rows],
        size_bytes=size,
        allocated_bytes=allocated,
        reserved_bytes=memory.reserved_bytes[rows],
        host=host,
        phase=phase,
        other_end=other_end,
        category=_categories(size, phase, other_end),
        held_before=0 if on_cpu else int(allocated[0] - size[0]),
        agrees=known and bool((np.diff(allocated) == size[1:]).all()),
    )


def _one_device(trace: Trace) -> NDArray[np.intp]:
    memory = trace.memory
    moves = memory.size_bytes != 0
    accelerated = moves & (memory.device_type != CPU)
    chosen = accelerated if accelerated.any() and trace.kind != "cpu" else moves & ~accelerated
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return rows
    top = rows[np.argmax(memory.allocated_bytes[rows])]
    same = memory.device_type[rows] == memory.device_type[top]
    chosen_rows: NDArray[np.intp] = rows[same & (memory.device[rows] == memory.device[top])]
    return chosen_rows


def _pair(address: Int64, size: Int64) -> Int64:
    """Joins an allocation to the next event at its address, if that is a release."""
    order = np.argsort(address, kind="stable")
    first, second = order[:-1], order[1:]
    joined = (address[first] == address[second]) & (size[first] > 0) & (size[second] < 0)
    out = np.full(len(size), ABSENT, np.int64)
    out[first[joined]] = second[joined]
    out[second[joined]] = first[joined]
    return out


def _around(trace: Trace, thread: Int32, time_ns: Int64) -> Int32:
    """The innermost host event that each instant lies in."""
    host = trace.host
    around = np.full(len(time_ns), ABSENT, np.int32)
    end = host.start_ns + host.dur_ns
    for lane in np.flatnonzero(np.bincount(thread[thread >= 0], minlength=1)).tolist():
        low, high = np.searchsorted(host.thread, (lane, lane + 1))
        events = np.flatnonzero(thread == lane)
        place = np.searchsorted(host.start_ns[low:high], time_ns[events], side="right") - 1
        around[events] = np.where(place >= 0, place + low, ABSENT)
    active = np.flatnonzero(around >= 0)
    while len(active := active[end[around[active]] < time_ns[active]]):
        around[active] = host.parent[around[active]]
        active = active[around[active] >= 0]
    return around


def _phases(trace: Trace, rows: Int32) -> Int8:
    host = trace.host
    annotated = host.kind != HostKind.PYTHON
    phase = np.zeros(len(rows), np.int8)
    backward = rows_named(trace, host, annotated, lambda name: name.startswith(BACKWARD))
    resets = rows_named(trace, host, annotated, lambda name: name.startswith(ZERO_GRAD))
    phase[nearest_of(host, backward, rows) >= 0] = MemoryPhase.BACKWARD
    phase[in_optimizer_step(trace, rows) >= 0] = MemoryPhase.OPTIMIZER
    phase[nearest_of(host, resets, rows) >= 0] = MemoryPhase.ZERO_GRAD
    return phase


def _categories(size: Int64, phase: Int8, other_end: Int64) -> Int8:
    """See the table at the top."""
    backward = phase == MemoryPhase.BACKWARD
    begins = backward & ~np.append(False, backward[:-1])
    run = np.cumsum(begins)  # how many backward passes have begun
    category = np.full(len(size), _OTHER, np.int8)
    allocates = size > 0
    has_end = other_end >= 0
    end = np.maximum(other_end, 0)
    ends_in = np.where(has_end, phase[end], -1)
    same_run = has_end & (run[end] == run)
    forward = allocates & (phase == MemoryPhase.FORWARD)
    category[forward & (ends_in == MemoryPhase.FORWARD) & same_run] = _TEMPORARIES
    category[forward & (ends_in == MemoryPhase.BACKWARD)] = _ACTIVATIONS
    in_backward = allocates & backward
    category[in_backward] = _GRADIENTS
    category[in_backward & (ends_in == MemoryPhase.BACKWARD) & same_run] = _TEMPORARIES
    in_step = allocates & (phase == MemoryPhase.OPTIMIZER)
    category[in_step & ~has_end] = _OPTIMIZER
    category[in_step & (ends_in == MemoryPhase.OPTIMIZER)] = _TEMPORARIES
    from_before = ~allocates & ~has_end
    category[from_before & (phase == MemoryPhase.ZERO_GRAD)] = _GRADIENTS
    category[from_before & backward] = _ACTIVATIONS
    released = ~allocates & has_end
    category[released] = category[end[released]]
    return category
