"""What a what-if looks at: the step's graph, and what is known about each of its tasks."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.call_tree import distinct_places
from stepscope.predict.kernels import Family, family_of
from stepscope.predict.optimizer_updates import ADAM

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from stepscope.explain.cpu_use import CpuUse
    from stepscope.explain.flops import Costs
    from stepscope.explain.memory.model import StepCalls
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.explain.replay.graph import Flags, Floats, Ints, StepGraph
    from stepscope.explain.work import Work
    from stepscope.predict.optimizer_updates import Rule
    from stepscope.predict.parameters import Parameters
    from stepscope.predict.scale_out import Exchange, Plan
    from stepscope.records.efficiency import Ceilings
    from stepscope.records.explanation import Steps
    from stepscope.records.job import Job
    from stepscope.records.memory import Memory
    from stepscope.records.profile import Profile
    from stepscope.records.trace import Trace

USUAL_MULTIPROCESSORS = 108


class Operators(msgspec.Struct, frozen=True, kw_only=True):
    """Of every task: the operator that answers for it, and its work. Inserted tasks have none."""

    row: Ints  # host row, -1 where nobody knows
    flops: Floats  # of the whole operator, 0 none, -1 unknown
    bytes_moved: Floats  # of the whole operator, -1 unknown
    dtype: NDArray[np.int8]  # code of explain.flops.DTYPES, -1 where nobody knows
    family: NDArray[np.int8]
    recomputed: Flags
    share: Floats  # of the operator's device time that this task is


class StepContext(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One rank's typical step, without the profiler's cost."""

    analysis: RankAnalysis
    trace: Trace
    work: Work
    steps: Steps
    graph: StepGraph
    costs: Costs
    parameters: Parameters | None
    ceilings: Ceilings | None
    memory: Memory | None = None
    calls: StepCalls | None = None  # of a step's forward, where shapes were recorded
    batch: int | None = None
    rule: Rule = ADAM  # of the optimizer
    grown: float = 1.0  # samples of a step over those of the trace
    host_spread: float = 0.0
    multiprocessors: int = USUAL_MULTIPROCESSORS
    # What more workers are predicted from, and the exchange as it was planned last.
    profiles: tuple[Profile, ...] = ()
    cpu: CpuUse | None = None  # of a step that computes on the CPU
    job: Job | None = None
    steps_ns: tuple[int, ...] = ()  # as measured, without the profiler where a run tells
    bare: StepGraph | None = None  # the step before an exchange was planned
    plan: Plan | None = None
    exchange: Exchange | None = None

    @property
    def on_host(self) -> bool:
        return self.work.on_host

    @property
    def task_phase(self) -> NDArray[np.int8]:
        return self.graph.calls.phase[self.graph.tasks.call]

    @cached_property
    def operators(self) -> Operators:
        """Of the graph's tasks: looked for where a what-if asks."""
        return look_at_tasks(self.trace, self.graph, self.costs, on_host=self.on_host)

    def named(self, matches: Callable[[str], object]) -> Flags:
        """Tasks whose operator's name matches; that of an unknown one is empty."""
        row, names = self.operators.row, self.trace.host.name
        codes = np.full(len(row), -1, np.int32)
        codes[row >= 0] = names[row[row >= 0]]
        told, of = distinct_places(codes)
        strings = self.trace.strings
        found = [bool(matches(strings[code] if code >= 0 else "")) for code in told.tolist()]
        return np.array(found, np.bool_)[of]


def look_at_tasks(trace: Trace, graph: StepGraph, costs: Costs, *, on_host: bool) -> Operators:
    """Tasks of the graph joined to the operators that launched them."""
    tasks = graph.tasks
    known = tasks.row >= 0
    row = np.full(len(tasks), -1, np.int32)
    if not on_host:
        row[known] = costs.operator[tasks.row[known]]
    told = row >= 0
    at = np.maximum(row, 0)
    none = np.zeros(len(tasks))
    flops = np.where(told, costs.flops[at], -1).astype(np.float64) if len(trace.host) else none
    moved = (
        np.where(told, costs.bytes_moved[at], -1).astype(np.float64) if len(trace.host) else none
    )
    counted = told & costs.counted[at] if len(trace.host) else none.astype(bool)
    flops = np.where(told & ~counted & (flops > 0), 0.0, flops)
    dtype = np.where(told, costs.dtype[at], -1) if len(trace.host) else none - 1
    group = np.where(told, row, len(trace.host) + np.arange(len(tasks)))
    _, of = distinct_places(group)
    total = np.bincount(of, tasks.dur_ns)
    return Operators(
        row=row,
        flops=flops,
        bytes_moved=moved,
        dtype=dtype.astype(np.int8),
        family=_families(trace, row, flops),
        recomputed=told & costs.recomputed[at] if len(trace.host) else none.astype(bool),
        share=np.divide(tasks.dur_ns, total[of], out=np.ones(len(tasks)), where=total[of] > 0),
    )


def _families(trace: Trace, row: Ints, flops: Floats) -> NDArray[np.int8]:
    """Each name is looked at once for each sign of its FLOPs: some, none, not known."""
    told = row >= 0
    out = np.full(len(row), Family.OTHER, np.int8)
    key = trace.host.name[row[told]].astype(np.int64) * 3 + np.sign(flops[told]).astype(int) + 1
    distinct, of = distinct_places(key)
    found = [family_of(trace.strings[each // 3], each % 3 - 1) for each in distinct.tolist()]
    out[told] = np.array(found, np.int8)[of]
    return out
