"""Allocator events of a trace as lifetimes of blocks; memory through one step, and from step
to step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.explanation import Steps
from stepscope.records.memory import CATEGORIES, Growth, MemoryTimeline, PhaseSpan
from stepscope.records.normal import median
from stepscope.records.trace import ABSENT, HostKind, Trace
from stepscope.step.arrays import Int8s, Int32s, Int64s
from stepscope.step.phases import in_optimizer_step
from stepscope.step.work import rows_named
from stepscope.trace.links import nearest_of

# allocated in            released                    is
# forward                 in backward                 activations
# forward                 before backward             temporaries
# forward                 after backward, or never    other: the batch, outputs, the loss
# backward                in the same backward        temporaries
# backward                later, or never             gradients
# the optimizer's step    in it                       temporaries
# the optimizer's step    never                       optimizer
# before the window       in zero_grad                gradients
# before the window       in backward                 activations
# before the window       elsewhere                   other
# before the window       never                       see traced.py

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
    time_ns: Int64s
    size_bytes: Int64s  # negative for a release
    allocated_bytes: Int64s  # right after the event
    reserved_bytes: Int64s
    host: Int32s  # the innermost host event around it, or -1
    phase: Int8s
    other_end: Int64s  # row of its release, or of its allocation; -1 outside the window
    category: Int8s  # index into CATEGORIES
    held_before: int  # bytes that the window begins with
    agrees: bool  # the allocator's own totals are the sums of the sizes

    def __len__(self) -> int:
        return len(self.time_ns)

    @property
    def kept_bytes(self) -> int:
        """Bytes that the window began with and never released."""
        before = (self.size_bytes < 0) & (self.other_end < 0)
        return self.held_before + int(self.size_bytes[before].sum())

    def levels(self) -> Int64s:
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
    phase = _phase_of_rows(trace, host)
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


def _pair(address: Int64s, size: Int64s) -> Int64s:
    """Joins an allocation to the next event at its address, if that is a release."""
    order = np.argsort(address, kind="stable")
    first, second = order[:-1], order[1:]
    joined = (address[first] == address[second]) & (size[first] > 0) & (size[second] < 0)
    out = np.full(len(size), ABSENT, np.int64)
    out[first[joined]] = second[joined]
    out[second[joined]] = first[joined]
    return out


def _around(trace: Trace, thread: Int32s, time_ns: Int64s) -> Int32s:
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


def _phase_of_rows(trace: Trace, rows: Int32s) -> Int8s:
    host = trace.host
    annotated = host.kind != HostKind.PYTHON
    phase = np.zeros(len(rows), np.int8)
    backward = rows_named(trace, host, annotated, lambda name: name.startswith(BACKWARD))
    resets = rows_named(trace, host, annotated, lambda name: name.startswith(ZERO_GRAD))
    phase[nearest_of(host, backward, rows) >= 0] = MemoryPhase.BACKWARD
    phase[in_optimizer_step(trace, rows) >= 0] = MemoryPhase.OPTIMIZER
    phase[nearest_of(host, resets, rows) >= 0] = MemoryPhase.ZERO_GRAD
    return phase


def _categories(size: Int64s, phase: Int8s, other_end: Int64s) -> Int8s:
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


# Memory through one step, thinned for charts and JSON; its extremes stay.

BINS = 200


def thinned(time: Int64s, level: Int64s, bins: int = BINS) -> NDArray[np.intp]:
    """Rows of the highest and the lowest point of every bin of time, in order; first and last."""
    if len(time) <= 2 * bins:
        return np.arange(len(time))
    which = (time - time[0]) // (int(time[-1] - time[0]) // bins + 1)
    order = np.lexsort((level, which))
    starts = np.flatnonzero(np.diff(which[order], prepend=-1))
    ends = np.append(starts[1:], len(order)) - 1
    chosen = np.concatenate((order[starts], order[ends], [0, len(time) - 1]))
    return np.flatnonzero(np.bincount(chosen, minlength=len(time)))


def step_timeline(lifetimes: Lifetimes, levels: Int64s, peak: int, steps: Steps) -> MemoryTimeline:
    """The step that contains the peak, or the whole window."""
    time = lifetimes.time_ns
    low, high, start, name = 0, len(time), int(time[0]), "the whole window"
    for step in steps.steps:
        end = step.start_ns + step.dur_ns
        if step.start_ns <= time[peak] < end:
            low, high = (int(at) for at in np.searchsorted(time, (step.start_ns, end)))
            start, name = step.start_ns, step.name
    rows = low + thinned(time[low:high], lifetimes.allocated_bytes[low:high])
    return MemoryTimeline(
        of=name,
        start_ns=start,
        time_ns=tuple((time[rows] - start).tolist()),
        allocated_bytes=tuple(lifetimes.allocated_bytes[rows].tolist()),
        reserved_bytes=None if lifetimes.on_cpu else tuple(lifetimes.reserved_bytes[rows].tolist()),
        categories={
            category: tuple(levels[code, rows].tolist())
            for code, category in enumerate(CATEGORIES)
            if levels[code].any()
        },
        phases=_phase_spans(lifetimes, low, high, start),
    )


def _phase_spans(lifetimes: Lifetimes, low: int, high: int, start: int) -> tuple[PhaseSpan, ...]:
    """Forward before each backward, backward, the optimizer's step; everything else is unnamed."""
    phase, time = lifetimes.phase[low:high], lifetimes.time_ns[low:high]
    edges = np.flatnonzero(np.diff(phase, prepend=-1))
    codes = [MemoryPhase(code) for code in phase[edges].tolist()]
    ends = np.append(time[edges[1:]], time[-1:]).tolist()
    out = []
    for place, (edge, code, end) in enumerate(zip(edges.tolist(), codes, ends, strict=True)):
        before_backward = place + 1 < len(codes) and codes[place + 1] == MemoryPhase.BACKWARD
        trains = code in (MemoryPhase.BACKWARD, MemoryPhase.OPTIMIZER)
        if trains or (code == MemoryPhase.FORWARD and before_backward):
            began = int(time[edge])
            out.append(PhaseSpan(name=code.label, start_ns=began - start, dur_ns=end - began))
    return tuple(out)


# Does memory grow from step to step? A leak grows by about the same amount in every step.
#
# Bytes alive are compared at the ends of steps. The first steps of a run are left out: they create
# optimizer state, caches and workspaces. Fewer than three steps of growth prove nothing.

FIRST_STEPS = 3
LEAST_INCREASES = 3
MOST_ENDS = 64  # of a long run: its last steps say enough
_ALIKE = 0.5  # an increase may be this much smaller or larger than the median
_NUMBER = re.compile(r"#(\d{1,18})$")


def growth_of(
    source: Literal["steps", "trace", "capture"], ends_bytes: Sequence[int], skipped: int = 0
) -> Growth | None:
    """None for fewer than two ends."""
    if len(ends_bytes) < 2:
        return None
    increases = np.diff(np.array(ends_bytes, np.int64)).tolist()
    typical = median(increases)
    steady = len(increases) >= LEAST_INCREASES and all(
        increase > 0 and abs(increase - typical) <= _ALIKE * typical for increase in increases
    )
    return Growth(
        source=source,
        ends_bytes=tuple(ends_bytes),
        bytes_per_step=round(typical),
        steady=steady,
        skipped=skipped,
    )


def growth_of_steps(rows: Sequence[tuple[int, int]]) -> Growth | None:
    """From (step, bytes at its end) of steps.jsonl: the last steps that were read one after the
    other. Growth over the whole run is found in whole_run/memory_growth.py."""
    first = next((place for place, (step, _) in enumerate(rows) if step >= FIRST_STEPS), len(rows))
    start = max(first, len(rows) - MOST_ENDS)
    for place in range(len(rows) - 1, start, -1):
        if rows[place][0] - rows[place - 1][0] != 1:
            start = place
            break
    return growth_of("steps", [size for _, size in rows[start:]], skipped=first)


def growth_of_trace(lifetimes: Lifetimes, steps: Steps) -> Growth | None:
    """From allocator events: what is allocated at the end of each marked step."""
    if steps.source == "window":
        return None
    counted = [step for step in steps.steps if _number(step.name) >= FIRST_STEPS]
    ends = np.array([step.start_ns + step.dur_ns for step in counted], np.int64)
    place = np.searchsorted(lifetimes.time_ns, ends, side="right") - 1
    if len(place) and place[0] < 0:
        return None
    sizes = lifetimes.allocated_bytes[place].tolist()
    return growth_of("trace", sizes, skipped=len(steps.steps) - len(counted))


def _number(name: str) -> int:
    """7 for ProfilerStep#7; a step without a number counts as a late one."""
    match = _NUMBER.search(name)
    return int(match[1]) if match else FIRST_STEPS
