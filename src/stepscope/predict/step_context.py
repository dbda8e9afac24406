"""What a what-if reads: the step's graph, and what is known about each of its tasks."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.explain.call_tree import distinct_places
from stepscope.predict.by_text import by_text
from stepscope.predict.kernels import Family, family_of
from stepscope.predict.optimizer_rules import ADAM
from stepscope.predict.peak_memory.held_values import MemoryChange

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from stepscope.explain.cpu_use import CpuUse
    from stepscope.explain.flops import Costs
    from stepscope.explain.memory.model import StepCalls
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.explain.replay.graph import Flags, Floats, Ints, StepGraph
    from stepscope.explain.work import Work
    from stepscope.predict.batch_reading import BatchReading
    from stepscope.predict.optimizer_rules import UpdateRule
    from stepscope.predict.parameters import Parameters
    from stepscope.predict.stalls import StepStalls
    from stepscope.predict.worker_plan import Exchange, WorkerPlan
    from stepscope.records.efficiency import Ceilings
    from stepscope.records.explanation import Steps
    from stepscope.records.job import Job
    from stepscope.records.memory import Memory
    from stepscope.records.profile import Profile
    from stepscope.records.together_summary import ConsistencyPromise
    from stepscope.records.trace import Trace


class Operators(msgspec.Struct, frozen=True, kw_only=True):
    """The operator behind each task, and its work. Inserted tasks have none."""

    row: Ints  # host row, -1 if not known
    flops: Floats  # of the whole operator, 0 none, -1 unknown
    bytes_moved: Floats  # of the whole operator, -1 unknown
    dtype: NDArray[np.int8]  # code of explain.flops.DTYPES, -1 if not known
    family: NDArray[np.int8]
    recomputed: Flags
    share: Floats  # this task's share of the operator's device time


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
    calls: StepCalls | None = None  # of a step's forward, if shapes were recorded
    batch: int | None = None  # None: the trace does not say, or what it says is doubtful
    batch_reading: BatchReading | None = None
    rule: UpdateRule = ADAM  # of the optimizer
    grown: float = 1.0  # samples per step over those of the trace
    is_as_traced: bool = True  # operators run on the trace's device in its precision
    memory_change: MemoryChange = MemoryChange()  # that peak memory is worked out with
    update_form: str | None = None  # of the optimizer, if it was changed
    multiprocessors: int
    profiles: tuple[Profile, ...] = ()
    cpu: CpuUse | None = None  # of a step that computes on the CPU
    job: Job | None = None
    # Measured, without the profiler if the run recorded that; no stalls if those are known.
    steps_ns: tuple[int, ...] = ()
    stalls: StepStalls | None = None  # next to this step; None if the run's steps are not known
    bare: StepGraph | None = None  # the step before an exchange was planned
    bare_stalls: StepStalls | None = None
    plan: WorkerPlan | None = None
    exchange: Exchange | None = None  # as it was planned last
    consistency: ConsistencyPromise | None = None  # simulated; None: as it was

    @property
    def samples(self) -> int | None:
        """Of a step: its batch, or all batches whose gradients it accumulates."""
        batches = self.calls.batches_per_step if self.calls else None
        return self.batch * batches if self.batch and batches else None

    @property
    def on_host(self) -> bool:
        return self.work.on_host

    @property
    def stalls_ns(self) -> float:
        """What stalls add to an average step."""
        return self.stalls.total_ns if self.stalls else 0.0

    @property
    def task_phase(self) -> NDArray[np.int8]:
        return self.graph.calls.phase[self.graph.tasks.call]

    @cached_property
    def operators(self) -> Operators:
        return find_operators(self.trace, self.graph, self.costs, on_host=self.on_host)

    def named(self, matches: Callable[[str], object]) -> Flags:
        """Tasks whose operator's name matches; an unknown operator has an empty name."""
        names = self.trace.host.name

        def is_match(name: str) -> bool:
            return bool(matches(name))

        return by_text(self.trace, names, self.operators.row, is_match, is_match(""))


def find_operators(trace: Trace, graph: StepGraph, costs: Costs, *, on_host: bool) -> Operators:
    """Join the graph's tasks to the operators that launched them."""
    tasks = graph.tasks
    from_trace = tasks.row >= 0
    row = np.full(len(tasks), -1, np.int32)
    if not on_host:
        row[from_trace] = costs.operator[tasks.row[from_trace]]
    known = row >= 0
    at = np.maximum(row, 0)

    def of_operator(column: NDArray[Any], absent: int, empty: int = 0) -> NDArray[Any]:
        if not len(trace.host):
            return np.full(len(tasks), empty, column.dtype)
        return np.where(known, column[at], absent)

    counted = of_operator(costs.counted, False)
    flops = of_operator(costs.flops, -1).astype(np.float64)
    flops = np.where(known & ~counted & (flops > 0), 0.0, flops)
    # A graph's kernel has its own part of a call; others share one call of their operator.
    replayed = np.zeros(len(tasks), np.bool_)
    if not on_host:
        replayed[from_trace] = costs.replayed[tasks.row[from_trace]]
    part = np.ones(len(tasks))
    part[replayed] = costs.call_part[tasks.row[replayed]]
    moved = of_operator(costs.bytes_moved, -1).astype(np.float64)
    flops, moved = (np.where(column > 0, column * part, column) for column in (flops, moved))
    group = np.where(known & ~replayed, row, len(trace.host) + np.arange(len(tasks)))
    _, place = distinct_places(group)
    total = np.bincount(place, tasks.dur_ns)[place]
    return Operators(
        row=row,
        flops=flops,
        bytes_moved=moved,
        dtype=of_operator(costs.dtype, -1, empty=-1).astype(np.int8),
        family=_find_families(trace, row, flops),
        recomputed=of_operator(costs.recomputed, False),
        share=np.divide(tasks.dur_ns, total, out=np.ones(len(tasks)), where=total > 0),
    )


def _find_families(trace: Trace, row: Ints, flops: Floats) -> NDArray[np.int8]:
    """Look up each name once per sign of its FLOPs: some, none, not known."""
    known = row >= 0
    families = np.full(len(row), Family.OTHER, np.int8)
    key = trace.host.name[row[known]].astype(np.int64) * 3 + np.sign(flops[known]).astype(int) + 1
    distinct, place = distinct_places(key)
    by_key = [family_of(trace.strings[code // 3], code % 3 - 1) for code in distinct.tolist()]
    families[known] = np.array(by_key, np.int8)[place]
    return families
