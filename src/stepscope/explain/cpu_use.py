"""How well a step uses the CPU that it computes on: work, stalls, threads, and how busy the
machine was.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.records.hardware import Ceilings
from stepscope.records.rank_facts import HostLoad, PlainSteps
from stepscope.records.trace import Trace
from stepscope.step.arrays import Bools, Floats, Int32s, Int64s
from stepscope.step.call_tree import group
from stepscope.step.correct import event_cost_ns

if TYPE_CHECKING:
    from stepscope.explain.flops.costs import Costs, Pieces
    from stepscope.explain.rank_analysis import RankAnalysis

# How well a step uses the CPU that it computes on: work, stalls, and overhead of operators.
#
# Calls of one operator with the same shapes do the same work. Their quick pace is the lower
# quartile of their times. Time beyond twice that pace is a stall: the call only waited. Time of a
# short call beyond its arithmetic and its bytes is overhead: PyTorch chooses a kernel, makes the
# output, records for backward. Times are per step, without the profiler's cost of each event.

FEWEST_CALLS = 3  # of one operator and shapes: fewer do not show their pace
STALL = 2.0  # times the quick pace
MOST_OVERHEAD_NS = 10_000.0  # per event: longer calls do work whose amount is not known
UNPRICED_NS = 5_000.0  # calls shorter than this do hardly any work, known or not
LONG_NS = 200_000.0  # calls of this length gain from several threads
# One core without calibration: slower than any core in use today.
CORE_FLOPS_S, CORE_BYTES_S = 20e9, 5e9
# The bytes of a call that moves few of them are in the core's own cache.
CACHE_BYTES, CACHE_BYTES_S = 1 << 20, 25e9
_LEAST = 0.2  # of a call's time is its own, however much the profiler costs


class Product(msgspec.Struct, frozen=True, kw_only=True):
    """Matrix products, convolutions or attention of one operator and shapes."""

    operator: str
    shapes: str
    dtype: int  # index in flops.dtypes.PEAKS
    calls: float  # per step
    flops: float  # per call
    bytes_moved: float | None  # per call
    quick_ns: float  # per call
    own_ns: float  # per step, stalls included

    @property
    def flops_s(self) -> float:
        """At its quick pace."""
        return self.flops / self.quick_ns * 1e9 if self.quick_ns else 0.0


class CpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """One step's operators on the CPU. Shares are of their time. A bare trace has no load."""

    load: HostLoad | None
    events: float  # operators, including those inside others
    own_ns: float  # time of all operators
    stalled_ns: float
    overhead_ns: float
    long_ns: float  # at the quick pace, in calls that threads can share
    alone_long_ns: float  # the same calls on one undisturbed thread
    alone_short_ns: float  # all other calls on one undisturbed thread
    priced_share: float  # the amount of work is known
    paced_share: float  # there are enough calls to show a pace
    products: tuple[Product, ...]  # the longest first

    @property
    def stalled_share(self) -> float:
        return self.stalled_ns / self.own_ns if self.own_ns else 0.0

    @property
    def overhead_share(self) -> float:
        return self.overhead_ns / self.own_ns if self.own_ns else 0.0

    @property
    def long_share(self) -> float:
        return self.long_ns / self.own_ns if self.own_ns else 0.0


def measure_cpu_use(analysis: RankAnalysis) -> CpuUse | None:
    """None if an accelerator computes, or no operator was recorded."""
    if not analysis.work.on_host or not len(analysis.pieces):
        return None
    trace, costs, pieces = analysis.trace, analysis.costs, analysis.pieces
    load, ceilings = analysis.inputs.host_load, analysis.ceilings
    calls = _Calls(pieces, trace, costs, event_cost_ns(trace, analysis.slowness))
    work = _work_ns(costs, calls.rows, ceilings)
    steady = np.minimum(calls.own_ns, STALL * calls.quick_ns)
    dispatch = np.minimum(calls.quick_ns, calls.events * MOST_OVERHEAD_NS)
    short = calls.quick_ns < calls.events * UNPRICED_NS
    overhead = np.maximum(0.0, dispatch - np.maximum(work, 0.0))
    priced = work >= 0
    long = calls.quick_ns >= LONG_NS
    calibrated_threads = (ceilings.threads or 1) if ceilings else 1
    alone = _alone_ns(calls, long, work, load.threads if load else 1, calibrated_threads)
    steps, total = pieces.steps, float(calls.own_ns.sum())
    return CpuUse(
        load=load,
        events=len(pieces) / steps,
        own_ns=total / steps,
        stalled_ns=float((calls.own_ns - steady).sum()) / steps,
        overhead_ns=float(overhead[priced | short].sum()) / steps,
        long_ns=float(calls.quick_ns[long].sum()) / steps,
        alone_long_ns=float(alone[long].sum()) / steps,
        alone_short_ns=float(alone[~long].sum()) / steps,
        priced_share=float(calls.own_ns[priced].sum()) / total if total else 0.0,
        paced_share=float(calls.own_ns[calls.paced].sum()) / total if total else 0.0,
        products=_products(trace, costs, calls, steps),
    )


class _Calls:
    """One row for each call of an operator that accounts for the operators inside it."""

    def __init__(self, pieces: Pieces, trace: Trace, costs: Costs, event_ns: float) -> None:
        host = trace.host
        first, which, count = group(pieces.operator)
        self.rows = pieces.operator[first]
        self.events = np.bincount(which, minlength=count).astype(np.float64)
        taken = np.bincount(which, pieces.dur_ns.astype(np.float64), count)
        self.own_ns: Floats = np.maximum(taken - event_ns * self.events, _LEAST * taken)
        # The phase distinguishes calls of one name: the first gradient is stored, later ones added.
        self.first, self.of, self.kinds = group(
            host.name[self.rows],
            host.shapes[self.rows],
            host.dtypes[self.rows],
            costs.phase[self.rows],
            self.events.astype(np.int64),
        )
        quick, many = _quick_pace(self.own_ns, self.of, self.kinds)
        self.paced = many[self.of]
        self.quick_ns: Floats = np.where(
            self.paced, np.minimum(self.own_ns, quick[self.of]), self.own_ns
        )


def _quick_pace(own_ns: Floats, of: Int64s, kinds: int) -> tuple[Floats, Bools]:
    """The lower quartile of each kind of call, and whether there are enough calls to know it."""
    order = np.lexsort((own_ns, of))
    count = np.bincount(of, minlength=kinds)
    begin = np.cumsum(count) - count
    return own_ns[order][begin + (count - 1) // 4], count >= FEWEST_CALLS


def _work_ns(costs: Costs, rows: Int32s, ceilings: Ceilings | None) -> Floats:
    """The time of each call's arithmetic or bytes at the machine's rates; -1 if not known."""
    from stepscope.records.dtypes import PEAKS

    peaks = np.full(len(PEAKS) + 1, CORE_FLOPS_S)
    bytes_s = CORE_BYTES_S
    if ceilings:
        for code, name in enumerate(PEAKS):
            peaks[code] = ceilings.flops.get(name, CORE_FLOPS_S)
        bytes_s = ceilings.bytes_s or CORE_BYTES_S
    flops, moved = costs.flops[rows], costs.bytes_moved[rows]
    by_flops = np.maximum(flops, 0) / peaks[costs.dtype[rows]] * 1e9
    cached = (moved < CACHE_BYTES) & (bytes_s < CACHE_BYTES_S)
    by_bytes = np.maximum(moved, 0) / np.where(cached, CACHE_BYTES_S, bytes_s) * 1e9
    known = (flops >= 0) & ((moved >= 0) | (flops > 0))
    return np.where(known, np.maximum(by_flops, by_bytes), -1.0)


def _alone_ns(
    calls: _Calls, long: Bools, work: Floats, threads: int, calibrated_threads: int
) -> Floats:
    """Each call's time on one thread: by its quick pace, which is too long when threads lack cores,
    or by its work at one core's rates, whichever is shorter."""
    by_pace = calls.quick_ns * np.where(long, speedup(1, threads), 1.0)
    least = np.minimum(calls.quick_ns, calls.events * MOST_OVERHEAD_NS)
    by_work = np.maximum(work * speedup(1, calibrated_threads), least)
    return np.where(work >= 0, np.minimum(by_pace, by_work), by_pace)


def _products(trace: Trace, costs: Costs, calls: _Calls, steps: int) -> tuple[Product, ...]:
    host = trace.host
    sample = calls.rows[calls.first]
    count = np.bincount(calls.of, minlength=calls.kinds)
    own = np.bincount(calls.of, calls.own_ns, calls.kinds)
    quick = np.bincount(calls.of, calls.quick_ns, calls.kinds)
    counted = np.flatnonzero(costs.counted[sample] & (costs.flops[sample] > 0))
    products = [
        Product(
            operator=trace.strings[host.name[row]],
            shapes=trace.strings[host.shapes[row]] if host.shapes[row] >= 0 else "",
            dtype=int(costs.dtype[row]),
            calls=float(count[kind]) / steps,
            flops=float(costs.flops[row]),
            bytes_moved=float(costs.bytes_moved[row]) if costs.bytes_moved[row] >= 0 else None,
            quick_ns=float(quick[kind] / count[kind]),
            own_ns=float(own[kind]) / steps,
        )
        for kind in counted.tolist()
        for row in (int(sample[kind]),)
    ]
    return tuple(sorted(products, key=lambda product: -product.own_ns))


# How much faster more threads make an operator that they can share.

# Doubling the threads gives two to this power: memory and barriers cost the rest.
_POWER = 0.8


def speedup(threads: float, more: float) -> float:
    """The speedup of long operators from `threads` to `more` threads; below 1 for fewer."""
    return float((max(more, 1.0) / max(threads, 1.0)) ** _POWER)


# How busy the machine was during steps without the profiler, for the findings about threads.

DISTURBED = 0.10  # of the step without a core
MANY_TAKEN = 0.10  # of the cores, by others: every time is measured beside them
HELPERS = 0.3  # of the training thread's wait: below this, operators run on that thread only
_ALONE = 1.1  # cores that a single-threaded process keeps busy, with its helper threads
LEAST_WALL_NS = 100_000_000  # the system counts in hundredths of a second


def looked(use: CpuUse | None) -> tuple[HostLoad | None, PlainSteps | None]:
    """The load, and its counters if they cover enough time."""
    load = use.load if use else None
    plain = load.plain if load else None
    if plain is not None and (plain.wall_ns < LEAST_WALL_NS or plain.steps < 1):
        plain = None
    return load, plain


def lost_to_others(plain: PlainSteps) -> float:
    """Cores that other processes and other virtual machines kept busy."""
    return (plain.other_cores or 0.0) + plain.stolen_cores


def taken_by_others(load: HostLoad) -> float:
    """The share of the cores that others kept busy. A quota limits the job alone: others are
    compared with the cores that the job may run on."""
    cores = load.cores or load.room
    if not cores or load.plain is None or load.plain.wall_ns < LEAST_WALL_NS:
        return 0.0
    return lost_to_others(load.plain) / cores


def is_beside_others(use: CpuUse | None) -> bool:
    """Whether other programs took so many cores that every time of the step is doubtful."""
    return use is not None and use.load is not None and taken_by_others(use.load) >= MANY_TAKEN


def free_threads(load: HostLoad) -> int:
    """Threads per rank so that each has a core; at least one."""
    room = load.room or 1.0
    others = lost_to_others(load.plain) if load.plain and load.plain.wall_ns else 0.0
    free = min(room, (load.cores or room) - others)
    # A core that is half free deserves a thread.
    return max(1, math.floor(free / max(1, load.local_ranks or 1) + 0.5))


def idle_cores(load: HostLoad, plain: PlainSteps) -> float | None:
    """Idle cores that the process may use; None where the system does not report them."""
    if load.room is None or plain.busy_ns is None:
        return None
    return max(0.0, load.room - plain.busy_ns / plain.wall_ns - plain.stolen_cores)


def disturbed(use: CpuUse) -> bool:
    """Whether threads waited for cores, so that operators do not show how fast they can be."""
    _, plain = looked(use)
    return plain is not None and (plain.waiting_share or 0.0) >= DISTURBED


def threads_take_part(load: HostLoad, plain: PlainSteps) -> bool:
    """Whether other threads than the training thread compute, or try to; True if not known."""
    if load.threads < 2:
        return False
    if plain.used_cores is None or plain.used_cores > _ALONE:
        return True
    if plain.waiting_ns is None or plain.training_waiting_ns is None:
        return True
    return plain.waiting_ns - plain.training_waiting_ns >= HELPERS * plain.training_waiting_ns
