"""Waits that only the profiler caused: in a window, one rank's profiler slows it, and others wait.

Ranks that share a machine's cores are slowed by different amounts while they are recorded. The wait
for the slowest is then part of a trace's communication, and no part of a plain step. The run's
collectives tell what a rank waits in plain steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.findings import exposed_communication, sort_findings
from stepscope.explain.findings.evidence import LOW

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from stepscope.records.explanation import Budget, Finding, RankExplanation

    Ints = NDArray[np.int64]

_COMM = "exposed_comm"
_OWN = ("compute", "operators", "python", "idle_launch", "idle_other")
_MUCH = 0.1  # of the step
_FEWEST = 10  # plain steps whose waits are known


def without_window_waits(
    ranks: tuple[RankExplanation, ...],
    waits: Mapping[int, tuple[Ints, Ints]],
    error_ns: Mapping[int, float],
) -> tuple[RankExplanation, ...]:
    """Ranks of a CPU job, with the communication of a plain step: what its transfers take, by the
    rank that is exposed least, and what the rank waits in plain steps. The rest is its own work."""
    exposed = [_part_ms(rank.budget, _COMM) for rank in ranks]
    if len(ranks) < 2 or not all(exposed) or any(rank.kind != "cpu" for rank in ranks):
        return ranks
    transfer_ms = min(exposed)
    return tuple(
        _with_most(rank, transfer_ms + (_median(waits[number]) + error_ns.get(number, 0.0)) / 1e6)
        if number in waits and len(waits[number][0]) >= _FEWEST
        else rank
        for rank in ranks
        for number in (rank.rank or 0,)
    )


def _median(waits: tuple[Ints, Ints]) -> float:
    return float(np.median(waits[1]))


def _part_ms(budget: Budget, name: str) -> float:
    return sum(part.ms for part in budget.parts if part.id == name)


def _with_most(rank: RankExplanation, most_ms: float) -> RankExplanation:
    budget = rank.budget
    too_long = _part_ms(budget, _COMM) - most_ms
    own = [part for part in budget.parts if part.id in _OWN]
    own_ms = sum(part.ms for part in own)
    if too_long < _MUCH * budget.step_ms or own_ms <= 0:
        return rank
    grown = {part.id: 1 + too_long / own_ms for part in own}
    grown[_COMM] = most_ms / (most_ms + too_long)
    parts = tuple(
        replace(part, ms=part.ms * by, share=part.share * by)
        for part in budget.parts
        for by in (grown.get(part.id, 1.0),)
    )
    budget = replace(budget, parts=parts)
    findings = [_judge_again(finding, budget) for finding in rank.findings]
    left = sort_findings([finding for finding in findings if finding is not None])
    return replace(rank, budget=budget, findings=left or rank.findings)


def _judge_again(finding: Finding, budget: Budget) -> Finding | None:
    """Communication by what is left of it; None where that is little."""
    if finding.id != exposed_communication.RULE.id:
        return finding
    share = sum(part.share for part in budget.parts if part.id == _COMM)
    if share < LOW:
        return None
    return exposed_communication.with_share(finding, share, budget.step_ms)
