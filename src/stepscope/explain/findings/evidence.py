"""What findings are made from, and the words and thresholds they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.lines import user_place

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    from stepscope.records.trace import Trace

HIGH, MEDIUM, LOW = 0.25, 0.10, 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One rank's numbers. Timeline, idle and gaps are those of the budget's window."""

    trace: Trace
    on_host: bool
    timeline: Timeline
    idle: Idle
    gaps: Gaps
    budget: Budget
    kernels: tuple[Kernel, ...]
    launches: Launches
    copies: tuple[Copy, ...]
    syncs: tuple[SyncCall, ...]
    collectives: tuple[Collective, ...]

    @property
    def device(self) -> str:
        """The word for the device in sentences."""
        return "CPU" if self.on_host else "GPU" if self.trace.kind in ("cuda", "rocm") else "device"

    def share(self, ns: float) -> float:
        """Part of the budget's window."""
        return ns / self.timeline.span_ns if self.timeline.span_ns else 0.0

    def step_ms(self, ns: float) -> str:
        """The same as milliseconds of one step, for a sentence."""
        return f"{self.share(ns) * self.budget.step_ms:.2f} ms of a {self.budget.step_ms:.2f} ms step"


def severity(share: float) -> Severity:
    """How grave a share of the step is."""
    if share >= HIGH:
        return "high"
    if share >= MEDIUM:
        return "medium"
    return "low"


def places(evidence: Evidence, causes: Iterable[int], most: int = 3) -> tuple[Place, ...]:
    """Where in the user's code the gaps of these causes lie, the costliest first."""
    gaps, trace = evidence.gaps, evidence.trace
    chosen = np.isin(gaps.cause, list(causes)) & (gaps.frame >= 0)
    cost: dict[Place, int] = {}
    sizes = (gaps.end_ns - gaps.start_ns)[chosen]
    frames, inverse = np.unique(gaps.frame[chosen], return_inverse=True)
    totals = np.zeros(len(frames), np.int64)
    np.add.at(totals, inverse.reshape(-1), sizes)
    for frame, total in zip(frames.tolist(), totals.tolist(), strict=True):
        place = user_place(trace, frame)
        if place:
            cost[place] = cost.get(place, 0) + total
    return tuple(sorted(cost, key=lambda place: -cost[place])[:most])
