"""What findings are made from, and the words and thresholds they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.explain.call_tree import group, sum_by
from stepscope.explain.python_functions import place_of, user_frames
from stepscope.explain.shapes import MOST, shape_words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from stepscope.explain.cpu_use import CpuUse
    from stepscope.explain.window_kernels import Launched
    from stepscope.records.efficiency import Efficiency, Spot
    from stepscope.records.explanation import (
        Budget,
        Collective,
        Copy,
        Gaps,
        Idle,
        Kernel,
        Launches,
        Place,
        Severity,
        SyncCall,
        Timeline,
    )
    from stepscope.records.memory import Memory
    from stepscope.records.strategies import RankStrategy
    from stepscope.records.trace import Trace

HIGH, MEDIUM, LOW = 0.25, 0.10, 0.03
_BUSY = ("compute", "exposed_comm", "exposed_memory")


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's numbers. Timeline, idle, gaps and what was launched are those of the budget's
    window; the tables and `whole` cover the whole trace."""

    trace: Trace
    on_host: bool
    timeline: Timeline
    whole: Timeline
    idle: Idle
    gaps: Gaps
    budget: Budget
    kernels: tuple[Kernel, ...]
    launches: Launches
    launched: Launched
    copies: tuple[Copy, ...]
    syncs: tuple[SyncCall, ...]
    collectives: tuple[Collective, ...]
    efficiency: Efficiency | None = None
    memory: Memory | None = None
    cpu: CpuUse | None = None  # of a step that computes on the CPU
    strategies: tuple[RankStrategy, ...] = ()
    layout: dict[str, Any] = {}  # rank.json's "communication"; empty for a bare trace
    cycles: int = 1  # steps in the budget's window

    @property
    def device(self) -> str:
        """The word for the device in sentences."""
        return "CPU" if self.on_host else "GPU" if self.trace.kind in ("cuda", "rocm") else "device"

    def part(self, *ids: str) -> float:
        """These parts' share of the step of record."""
        return sum(part.share for part in self.budget.parts if part.id in ids)

    def part_ms(self, *ids: str) -> str:
        """The same as milliseconds of one step, for a sentence."""
        ms = self.part(*ids) * self.budget.step_ms
        return f"{ms:.2f} ms of a {self.budget.step_ms:.2f} ms step"

    def share(self, ns: float) -> float:
        """Part of the budget's window."""
        return ns / self.timeline.span_ns if self.timeline.span_ns else 0.0

    def step_ms(self, ns: float) -> str:
        """The same as milliseconds of one step, for a sentence."""
        return (
            f"{self.share(ns) * self.budget.step_ms:.2f} ms of a {self.budget.step_ms:.2f} ms step"
        )

    def device_share(self, ns: float) -> float:
        """Device time of the budget's window as part of the step of record: the profiler makes
        steps longer, not kernels. Kernels side by side count once at most."""
        computing = self.share(self.timeline.compute_ns)
        return min(1.0, self.share(ns) * self.part("compute") / computing) if computing else 0.0

    def idle_share(self, ns: float) -> float:
        """Idle time of the budget's window as part of the step of record, which has less of it."""
        idle = self.share(self.timeline.idle_ns)
        now = sum(part.share for part in self.budget.parts if part.id not in _BUSY)
        return min(1.0, self.share(ns) * now / idle) if idle else 0.0

    def of_step(self, ns: float) -> float:
        """Device time of the window's mean step, such as a Spot's, as part of the step."""
        return self.device_share(ns * self.cycles)

    def ms(self, share: float) -> str:
        """A share of the step of record as milliseconds, for a sentence."""
        return f"{share * self.budget.step_ms:.2f} ms of a {self.budget.step_ms:.2f} ms step"


def spot_words(evidence: Evidence, spot: Spot) -> str:
    """An operator with its shapes, and its part of the step."""
    part = evidence.ms(evidence.of_step(spot.device_ns))
    return f"{spot.operator} {shape_words(spot.shapes, MOST)}: {part}"


def severity(share: float) -> Severity:
    """How grave a share of the step is."""
    if share >= HIGH:
        return "high"
    if share >= MEDIUM:
        return "medium"
    return "low"


def kernel_severity(evidence: Evidence, saved: float) -> Severity:
    """How grave time in kernels is: while the step waits for the host, faster kernels would only
    wait longer."""
    found = severity(saved)
    starved = evidence.part("operators", "python", "data_loading") >= HIGH
    return "medium" if found == "high" and starved else found


def places(evidence: Evidence, causes: Iterable[int], most: int = 3) -> tuple[Place, ...]:
    """Where in the user's code the gaps of these causes lie, the costliest first."""
    gaps, trace = evidence.gaps, evidence.trace
    chosen = np.flatnonzero(np.isin(gaps.cause, list(causes)) & (gaps.frame >= 0))
    return costliest_places(trace, gaps.frame[chosen], (gaps.end_ns - gaps.start_ns)[chosen], most)


def costliest_places(
    trace: Trace, rows: NDArray[np.int32], cost: NDArray[np.int64], most: int = 3
) -> tuple[Place, ...]:
    """The user's functions around these host rows, the costliest first; none without stacks."""
    frames = user_frames(trace, rows)
    found = frames >= 0
    if not found.any():
        return ()
    first, inverse, count = group(trace.host.name[frames[found]])
    total = sum_by(inverse, cost[found], count)
    names = (trace.strings[trace.host.name[frames[found][first[i]]]] for i in np.argsort(-total))
    return tuple(place for name in names if (place := place_of(name)))[:most]
