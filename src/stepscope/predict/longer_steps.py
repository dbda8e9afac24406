"""What changes a typical step also changes the work of steps that are longer for having more of it
(explain/longer_work.py); among the run's stalls they are unexplained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.explain.longer_work import longer_work_ns

if TYPE_CHECKING:
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.predict.stalls import StepStalls

_UNKNOWN = "unknown"


def with_longer_steps(stalls: StepStalls | None, analysis: RankAnalysis) -> StepStalls | None:
    """The stalls, knowing which share of the unexplained ones is work."""
    if stalls is None or _UNKNOWN not in stalls.periodic:
        return stalls
    longer = len(stalls.excess_ns.get(_UNKNOWN, ()))
    cost_ns = stalls.cost_ns.get(_UNKNOWN, 0.0) * stalls.steps
    if not longer or not cost_ns:
        return stalls
    return replace(stalls, work_share=min(1.0, longer * longer_work_ns(analysis) / cost_ns))
