"""Waits of other ranks' making: stalls that one rank passes on through collectives, and
waits that only the profiler caused.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from stepscope.explain.budget import stall_parts
from stepscope.explain.findings import sort_findings
from stepscope.explain.findings.communication import exposed_communication, with_share
from stepscope.explain.findings.evidence import LOW
from stepscope.explain.findings.loop import find_periodic_stall, irregular_stalls, periodic_stall
from stepscope.explain.whole_run.rank_run import sum_up_stalls
from stepscope.records.explanation import Budget, Finding, RankExplanation
from stepscope.records.normal import median
from stepscope.records.run import STALL_CAUSES, RankRun, StallCause
from stepscope.step.arrays import Floats, Int64s

_OF_UNKNOWN = {irregular_stalls.id: irregular_stalls.judge, periodic_stall.id: find_periodic_stall}
_UNKNOWN, _COLLECTIVE = STALL_CAUSES.index("unknown"), STALL_CAUSES.index("collective")


def explain_waits(
    ranks: tuple[RankExplanation, ...],
    waits: dict[int, tuple[Int64s, Int64s]],
    error_ns: Mapping[int, float],
) -> tuple[RankExplanation, ...]:
    """Ranks whose unexplained stalls were waits for another rank. `waits` holds, by rank, numbers
    of steps and what the rank waited in them; `error_ns` how far off that may be."""
    return tuple(
        _with_waits(rank, *waits[number], error_ns.get(number, 0.0)) if number in waits else rank
        for rank in ranks
        for number in (rank.rank or 0,)
    )


def _with_waits(
    rank: RankExplanation, numbers: Int64s, wait_ns: Int64s, error_ns: float
) -> RankExplanation:
    if rank.run is None:
        return rank
    run = divide_unknown(rank.run, numbers, wait_ns, error_ns)
    if run is rank.run:
        return rank
    # The findings that looked at stalls without a known cause look once more.
    others = [finding for finding in rank.findings if finding.id not in _OF_UNKNOWN]
    again = [finding for rule in _OF_UNKNOWN.values() if (finding := rule(run))]
    findings = sort_findings([*others, *again]) or rank.findings
    return replace(rank, run=run, budget=_shown(rank.budget, run), findings=findings)


def divide_unknown(
    run: RankRun, numbers: Int64s, wait_ns: Int64s, error_ns: float = 0.0
) -> RankRun:
    """The same run, with a stall of the cause "collective" for what the rank waited beyond its
    usual wait in steps that stalled for no known cause. A wait within its error is none."""
    series = run.series
    if series is None or series.unknown_ns is None or run.times is None or not len(numbers):
        return run
    longer = wait_ns - median(wait_ns)
    # The values at their steps; zero for steps without one.
    beyond = np.zeros(len(series.number), np.int64)
    place = np.searchsorted(series.number, numbers)
    known = (place < len(series.number)) & (
        series.number[np.minimum(place, len(series.number) - 1)] == numbers
    )
    beyond[place[known]] = np.rint(np.where(longer > error_ns, longer, 0.0)[known]).astype(np.int64)
    unknown = series.unknown_ns
    waited = np.clip(beyond.astype(np.float64), 0.0, unknown)
    if not waited.any():
        return run
    is_unknown = series.cause == _UNKNOWN
    left = unknown - waited
    kept = [stall for stall in run.stalls if stall.cause != "unknown"]
    mean_ns = 1e6 * run.times.mean_ms
    causes: tuple[tuple[StallCause, Floats], ...] = (("collective", waited), ("unknown", left))
    for name, excess in causes:
        stall = sum_up_stalls(name, excess, series.number, mean_ns)
        if name == "collective" and error_ns:
            stall = replace(stall, wait_error_ms=error_ns / 1e6)
        if stall.steps:
            # Its cost per steady step; it was summed up over all steps.
            factor = len(excess) / run.times.steps
            kept.append(replace(stall, cost_ms=stall.cost_ms * factor, share=stall.share * factor))
    cause = np.where(is_unknown & (waited > left), np.int8(_COLLECTIVE), series.cause)
    return replace(
        run,
        stalls=tuple(sorted(kept, key=lambda stall: -stall.cost_ms - stall.between_epochs_ms)),
        series=replace(series, cause=cause.astype(np.int8), unknown_ns=left),
    )


def _shown(budget: Budget, run: RankRun) -> Budget:
    """The budget with the run's stalls."""
    others = [part for part in budget.parts if not part.id.startswith("stall_")]
    return replace(budget, parts=(*others, *stall_parts(run)))


# Waits that only the profiler caused: in a window, one rank's profiler slows it, and others wait.
#
# Ranks that share a machine's cores are slowed by different amounts while they are recorded. The
# wait for the slowest is then part of a trace's communication, and no part of a plain step. The
# run's collectives tell what a rank waits in plain steps.

_COMM = "exposed_comm"
_OWN = ("compute", "operators", "python", "idle_launch", "idle_other")
_MUCH = 0.1  # of the step
_FEWEST = 10  # plain steps whose waits are known


def without_window_waits(
    ranks: tuple[RankExplanation, ...],
    waits: Mapping[int, tuple[Int64s, Int64s]],
    error_ns: Mapping[int, float],
) -> tuple[RankExplanation, ...]:
    """Ranks of a CPU job, with the communication of a plain step: what its transfers take, by the
    rank that is exposed least, and what the rank waits in plain steps. The rest is its own work."""
    exposed = [_part_ms(rank.budget, _COMM) for rank in ranks]
    if len(ranks) < 2 or not all(exposed) or any(rank.kind != "cpu" for rank in ranks):
        return ranks
    transfer_ms = min(exposed)
    return tuple(
        _with_most(
            rank,
            transfer_ms + (median(waits[number][1]) + error_ns.get(number, 0.0)) / 1e6,
        )
        if number in waits and len(waits[number][0]) >= _FEWEST
        else rank
        for rank in ranks
        for number in (rank.rank or 0,)
    )


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
    findings = [_judge_by_budget(finding, budget) for finding in rank.findings]
    left = sort_findings([finding for finding in findings if finding is not None])
    return replace(rank, budget=budget, findings=left or rank.findings)


def _judge_by_budget(finding: Finding, budget: Budget) -> Finding | None:
    """Communication by what is left of it; None where that is little."""
    if finding.id != exposed_communication.id:
        return finding
    share = sum(part.share for part in budget.parts if part.id == _COMM)
    return None if share < LOW else with_share(finding, share, budget.step_ms)
