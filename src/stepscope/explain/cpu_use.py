"""How well a step that computes on the CPU uses it: work, stalls, and the cost of each operator.

Calls of one operator with the same shapes do the same work. Their quick pace is the lower quartile
of their times; what a call takes beyond twice that pace is a stall, in which it did nothing but
wait. What a short call takes beyond its arithmetic and its bytes is overhead: PyTorch choosing a
kernel, making the output, recording for backward. Times are those of the trace less the profiler's
cost of each event, and of one step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.call_tree import group
from stepscope.explain.replay.cpu_overhead import event_cost_ns
from stepscope.explain.threading_gain import speedup

if TYPE_CHECKING:
    from stepscope.explain.arrays import Bools, Floats, Int32s, Int64s
    from stepscope.explain.flops.costs import Costs
    from stepscope.explain.flops.pieces import Pieces
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.records.efficiency import Ceilings
    from stepscope.records.host_load import HostLoad
    from stepscope.records.trace import Trace


FEWEST_CALLS = 3  # of one operator and shapes: fewer do not tell their pace
STALL = 2.0  # times the quick pace
MOST_OVERHEAD_NS = 10_000.0  # of one event: what takes longer is work that nobody priced
UNPRICED_NS = 5_000.0  # a call that short has no work to speak of, priced or not
LONG_NS = 200_000.0  # a call that several threads can share with profit
# Of one core, where nothing was calibrated: slower than any that trains today.
CORE_FLOPS_S, CORE_BYTES_S = 20e9, 5e9
# What few bytes a call moves lie in the core's own cache.
CACHE_BYTES, CACHE_BYTES_S = 1 << 20, 25e9
_LEAST = 0.2  # of a call's time is its own, whatever the profiler costs


class Product(msgspec.Struct, frozen=True, kw_only=True):
    """Matrix products, convolutions or attention of one operator and shapes."""

    operator: str
    shapes: str
    dtype: int  # code of flops.dtypes.DTYPES
    calls: float  # of one step
    flops: float  # of one call
    bytes_moved: float | None  # of one call
    quick_ns: float  # of one call
    own_ns: float  # of one step, stalls included

    @property
    def flops_s(self) -> float:
        """At its quick pace."""
        return self.flops / self.quick_ns * 1e9 if self.quick_ns else 0.0


class CpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """One step's operators on the CPU. All but the load is known for a bare trace too."""

    load: HostLoad | None
    events: float  # operators, those inside others too
    own_ns: float  # all operators' time
    stalled_ns: float
    overhead_ns: float
    long_ns: float  # at the quick pace, of calls that threads can share
    # What one thread would need that nothing disturbs: for calls that threads can share, others.
    alone_long_ns: float
    alone_short_ns: float
    priced_share: float  # of the operators' time: work is known
    paced_share: float  # of the operators' time: enough calls to tell a pace
    products: tuple[Product, ...]  # the longest first

    @property
    def stalled_share(self) -> float:
        """Of the operators' time."""
        return self.stalled_ns / self.own_ns if self.own_ns else 0.0

    @property
    def overhead_share(self) -> float:
        """Of the operators' time."""
        return self.overhead_ns / self.own_ns if self.own_ns else 0.0

    @property
    def long_share(self) -> float:
        """Of the operators' time."""
        return self.long_ns / self.own_ns if self.own_ns else 0.0


def measure_cpu_use(analysis: RankAnalysis) -> CpuUse | None:
    """None where an accelerator computes, or no operator was recorded."""
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
    alone = _alone_ns(calls, long, work, _threads(load), _threads_of(ceilings))
    steps = pieces.steps
    total = float(calls.own_ns.sum())
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
    """Columns of the operators that answer for all the others: one row for each call."""

    def __init__(self, pieces: Pieces, trace: Trace, costs: Costs, event_ns: float) -> None:
        host = trace.host
        first, which, count = group(pieces.operator)
        self.rows = pieces.operator[first]
        self.events = np.bincount(which, minlength=count).astype(np.float64)
        taken = np.bincount(which, pieces.dur_ns.astype(np.float64), count)
        self.own_ns: Floats = np.maximum(taken - event_ns * self.events, _LEAST * taken)
        # The phase tells apart calls of one name: a gradient is added to nothing, or to another.
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
    """The lower quartile of each kind, and whether it has calls enough to tell."""
    order = np.lexsort((own_ns, of))
    count = np.bincount(of, minlength=kinds)
    begin = np.cumsum(count) - count
    return own_ns[order][begin + (count - 1) // 4], count >= FEWEST_CALLS


def _work_ns(costs: Costs, rows: Int32s, ceilings: Ceilings | None) -> Floats:
    """Arithmetic or bytes of each call at the machine's rates; -1 where nobody knows."""
    from stepscope.explain.flops.dtypes import DTYPES

    peaks = np.full(len(DTYPES) + 1, CORE_FLOPS_S)
    bytes_s = CORE_BYTES_S
    if ceilings:
        for code, name in enumerate(DTYPES):
            peaks[code] = ceilings.flops.get(name, CORE_FLOPS_S)
        bytes_s = ceilings.bytes_s or CORE_BYTES_S
    flops, moved = costs.flops[rows], costs.bytes_moved[rows]
    by_flops = np.maximum(flops, 0) / peaks[costs.dtype[rows]] * 1e9
    cached = (moved < CACHE_BYTES) & (bytes_s < CACHE_BYTES_S)
    by_bytes = np.maximum(moved, 0) / np.where(cached, CACHE_BYTES_S, bytes_s) * 1e9
    known = (flops >= 0) & ((moved >= 0) | (flops > 0))
    return np.where(known, np.maximum(by_flops, by_bytes), -1.0)


def _alone_ns(calls: _Calls, long: Bools, work: Floats, threads: int, measured_with: int) -> Floats:
    """Of each call on one thread: by its quick pace, which threads without cores make too long, or
    by its work at one core's rates, the shorter of both."""
    by_pace = calls.quick_ns * np.where(long, speedup(1, threads), 1.0)
    least = np.minimum(calls.quick_ns, calls.events * MOST_OVERHEAD_NS)
    by_work = np.maximum(work * speedup(1, measured_with), least)
    return np.where(work >= 0, np.minimum(by_pace, by_work), by_pace)


def _threads(load: HostLoad | None) -> int:
    return load.threads if load else 1


def _threads_of(ceilings: Ceilings | None) -> int:
    """That the ceilings were measured with; those of one core where nothing was."""
    return (ceilings.threads or 1) if ceilings else 1


def _products(trace: Trace, costs: Costs, calls: _Calls, steps: int) -> tuple[Product, ...]:
    host = trace.host
    sample = calls.rows[calls.first]
    count = np.bincount(calls.of, minlength=calls.kinds)
    own = np.bincount(calls.of, calls.own_ns, calls.kinds)
    quick = np.bincount(calls.of, calls.quick_ns, calls.kinds)
    counted = np.flatnonzero(costs.counted[sample] & (costs.flops[sample] > 0))
    found = [
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
    return tuple(sorted(found, key=lambda product: -product.own_ns))
