"""What findings look at, and the thresholds and words they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from stepscope.explain.call_tree import group, sum_by
from stepscope.explain.compiled import is_mostly_compiled
from stepscope.explain.graph_replays import MOSTLY
from stepscope.explain.python_functions import place_of, user_frames
from stepscope.explain.shapes import MOST, which_call
from stepscope.records.figures import milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from stepscope.explain.arrays import Int32s, Int64s
    from stepscope.explain.cpu_use import CpuUse
    from stepscope.explain.nccl.groups import NcclGroup
    from stepscope.explain.window_kernels import Launched
    from stepscope.records import explanation
    from stepscope.records.compiled import CompiledWork
    from stepscope.records.efficiency import Efficiency, Spot
    from stepscope.records.explanation import Finding, Place, Severity
    from stepscope.records.job import Job, SimilarRuns
    from stepscope.records.memory import Memory
    from stepscope.records.nccl import NcclLog
    from stepscope.records.strategies import RankStrategy, Strategy
    from stepscope.records.trace import Trace
    from stepscope.records.whole_run import RankRun

HIGH, MEDIUM, LOW = 0.25, 0.10, 0.03
_BUSY = ("compute", "exposed_comm", "exposed_memory")


class RankEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's numbers. Timeline, idle, gaps and `launched` cover the budget's window; the tables
    and `whole` cover the whole trace."""

    trace: Trace
    on_host: bool
    timeline: explanation.Timeline
    whole: explanation.Timeline
    idle: explanation.Idle
    gaps: explanation.Gaps
    budget: explanation.Budget
    kernels: tuple[explanation.Kernel, ...]
    launches: explanation.Launches
    launched: Launched
    copies: tuple[explanation.Copy, ...]
    syncs: tuple[explanation.SyncCall, ...]
    collectives: tuple[explanation.Collective, ...]
    efficiency: Efficiency | None = None
    memory: Memory | None = None
    cpu: CpuUse | None = None  # for a step that computes on the CPU
    strategies: tuple[RankStrategy, ...] = ()
    layout: dict[str, Any] = {}  # rank.json's "communication"; empty for a bare trace
    similar: SimilarRuns | None = None  # runs of the same script beside this one
    cycles: int = 1  # steps in the budget's window
    run: RankRun | None = None  # all steps of the rank, where they were captured
    compiled: CompiledWork | None = None  # what torch.compile did
    replayed: float = 0.0  # of the device's time: launched by CUDA graphs
    longer_work_ns: float = 0.0  # that the device does more in steps that come at a fixed distance

    @property
    def device(self) -> str:
        """The word for the device in sentences."""
        return "CPU" if self.on_host else "GPU" if self.trace.kind in ("cuda", "rocm") else "device"

    @property
    def is_graphed(self) -> bool:
        """CUDA graphs launch most of the step already."""
        return self.replayed > MOSTLY

    @property
    def is_compiled(self) -> bool:
        """torch.compile's graphs do most of the computing already."""
        return is_mostly_compiled(self.compiled, self.budget_share("compute") * self.budget.step_ms)

    def budget_share(self, *ids: str) -> float:
        """Share of the step of record that these parts of the budget take."""
        return sum(part.share for part in self.budget.parts if part.id in ids)

    def window_share(self, ns: float) -> float:
        """Share of the budget's window."""
        return ns / self.timeline.span_ns if self.timeline.span_ns else 0.0

    def device_share(self, ns: float) -> float:
        """Share of the step of record for device time in the window. The profiler makes steps
        longer, but not kernels. Kernels that run in parallel count once at most."""
        computing = self.window_share(self.timeline.compute_ns)
        if not computing:
            return 0.0
        return min(1.0, self.window_share(ns) * self.budget_share("compute") / computing)

    def idle_share(self, ns: float) -> float:
        """Share of the step of record for idle time in the window: the step of record has less."""
        idle = self.window_share(self.timeline.idle_ns)
        idle_now = sum(part.share for part in self.budget.parts if part.id not in _BUSY)
        return min(1.0, self.window_share(ns) * idle_now / idle) if idle else 0.0

    def mean_step_share(self, ns: float) -> float:
        """Share of the step for device time of the window's mean step, such as a Spot's."""
        return self.device_share(ns * self.cycles)

    def step_ms(self, share: float) -> str:
        """A share of the step in words: 3.67 ms of the 5.85 ms step."""
        step_ms = self.budget.step_ms
        return f"{milliseconds(share * step_ms)} of the {milliseconds(step_ms)} step"

    def budget_ms(self, *ids: str) -> str:
        """These parts of the budget in the same words."""
        return self.step_ms(self.budget_share(*ids))


class JobEvidence(NamedTuple):
    """What several ranks show together."""

    job: Job
    strategies: Sequence[Strategy]


class NcclEvidence(NamedTuple):
    """What NCCL's logs show."""

    logs: Sequence[NcclLog]
    groups: list[NcclGroup]


def from_memory(
    find_in: Callable[[Memory], Finding | None],
) -> Callable[[RankEvidence], Finding | None]:
    """The rule of a finding that looks at memory alone, as a snapshot has nothing else."""
    return lambda evidence: find_in(evidence.memory) if evidence.memory else None


def from_run(
    find_in: Callable[[RankRun], Finding | None],
) -> Callable[[RankEvidence], Finding | None]:
    """The rule of a finding that looks at the steps of the whole run."""
    return lambda evidence: find_in(evidence.run) if evidence.run else None


def spot_words(evidence: RankEvidence, spot: Spot) -> str:
    """An operator with its shapes, or its line, and its time in the step."""
    time = evidence.step_ms(evidence.mean_step_share(spot.device_ns))
    return f"{spot.operator} {which_call(spot, MOST)}: {time}"


def severity(share: float) -> Severity:
    """How severe the loss of this share of the step is."""
    return "high" if share >= HIGH else "medium" if share >= MEDIUM else "low"


def kernel_severity(evidence: RankEvidence, saved: float) -> Severity:
    """How severe slow kernels are. While the step waits for the host, faster kernels would only
    wait longer, so the severity is medium at most."""
    waits_for_host = evidence.budget_share("operators", "python", "data_loading") >= HIGH
    return "medium" if severity(saved) == "high" and waits_for_host else severity(saved)


def places(evidence: RankEvidence, causes: Iterable[int], most: int = 3) -> tuple[Place, ...]:
    """The lines of the user's code during gaps with these causes, the costliest first."""
    gaps, trace = evidence.gaps, evidence.trace
    chosen = np.flatnonzero(np.isin(gaps.cause, list(causes)) & (gaps.frame >= 0))
    return costliest_places(trace, gaps.frame[chosen], (gaps.end_ns - gaps.start_ns)[chosen], most)


def costliest_places(trace: Trace, rows: Int32s, cost: Int64s, most: int = 3) -> tuple[Place, ...]:
    """The user's functions around these host rows, the costliest first; none without stacks."""
    frames = user_frames(trace, rows)
    known = frames >= 0
    if not known.any():
        return ()
    first, inverse, count = group(trace.host.name[frames[known]])
    total = sum_by(inverse, cost[known], count)
    names = (trace.strings[trace.host.name[frames[known][first[i]]]] for i in np.argsort(-total))
    return tuple(place for name in names if (place := place_of(name)))[:most]
