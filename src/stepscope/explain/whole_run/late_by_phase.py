"""Which rank of a running job makes the others wait, by the phases of their typical steps.

Ranks that wait for each other take the same time, and wait in backward. A rank that spends longer
than the others before it (data, forward) or between (optimizer, other) is the one they wait for.
Only the collectives of a window prove it: see the findings.
"""

from __future__ import annotations

from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.live_run import LiveRank

OWN_PHASES = ("data", "forward", "optimizer", "other")  # in which a rank waits for no other
_LEAST_SHARE, _LEAST_MS = 0.05, 0.2  # of the typical step; noise is smaller
_FEWEST_STEPS = 10  # steady ones: of fewer, one long step decides the mean


class LongPhase(NamedTuple):
    """How much longer than the median rank this one spends in one phase."""

    rank: int
    phase: str
    extra_ms: float


def find_late_ranks(ranks: Sequence[LiveRank]) -> tuple[LongPhase, ...]:
    """The latest first; ranks with few steady steps do not count."""
    known = [rank for rank in ranks if rank.phases_ms and _steady_steps(rank) >= _FEWEST_STEPS]
    if len(known) < 2:
        return ()
    typical_ms = max(sum(rank.phases_ms.values()) for rank in known)
    least = max(_LEAST_SHARE * typical_ms, _LEAST_MS)
    usual = {phase: _usual_ms(known, phase) for phase in OWN_PHASES}
    late = [
        LongPhase(rank.run.rank, phase, extra)
        for rank in known
        for phase, ms in usual.items()
        if (extra := rank.phases_ms.get(phase, 0.0) - ms) > least
    ]
    return tuple(sorted(late, key=lambda one: -one.extra_ms))


def _steady_steps(rank: LiveRank) -> int:
    return rank.run.times.steps if rank.run.times is not None else 0


def _usual_ms(ranks: Sequence[LiveRank], phase: str) -> float:
    """The lower median: of two ranks, the faster one's."""
    return median_low(rank.phases_ms.get(phase, 0.0) for rank in ranks)
