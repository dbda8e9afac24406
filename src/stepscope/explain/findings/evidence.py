"""What findings are made from, and the words and thresholds they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.lines import place_of, user_frames
from stepscope.explain.tree import group, sum_by

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


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's numbers. Timeline, idle and gaps are those of the budget's window; the tables
    and `whole` cover the whole trace."""

    trace: Trace
    on_host: bool
    timeline: Timeline
    whole: Timeline
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
    chosen = np.flatnonzero(np.isin(gaps.cause, list(causes)) & (gaps.frame >= 0))
    frames = user_frames(trace, gaps.frame[chosen])
    found = frames >= 0
    if not found.any():
        return ()
    first, inverse, count = group(trace.host.name[frames[found]].astype(np.int64))
    cost = sum_by(inverse, (gaps.end_ns - gaps.start_ns)[chosen[found]], count)
    names = (trace.strings[trace.host.name[frames[found][first[i]]]] for i in np.argsort(-cost))
    return tuple(place for name in names if (place := place_of(name)))[:most]
