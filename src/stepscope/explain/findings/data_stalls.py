"""Some steps wait for data, though a typical step does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import from_run
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.findings.run_words import (
    cost_lines,
    costly_stall,
    stall_severity,
    stalling_steps,
    typical_wait,
)
from stepscope.records import remedies

if TYPE_CHECKING:
    from stepscope.records.explanation import Remedy
    from stepscope.records.whole_run import RankRun, Stall

_MOST_WORKERS = 32  # a longer period is more likely an epoch


def find_in(run: RankRun) -> Finding | None:
    """Waits for the data loader beyond what every step waits."""
    stall = costly_stall(run, "data")
    if stall is None:
        return None
    waits = stalling_steps(stall, run, "waits", "wait")
    return RULE.finding(
        share=stall.share,
        severity=stall_severity(stall),
        summary=f"{waits} {typical_wait(stall)} for data{_explain_period(stall)}.",
        evidence=cost_lines(stall, run),
        where=stall.where,
        remedies=_offer(stall),
    )


def _in_bursts(stall: Stall) -> bool:
    return stall.period is not None and 2 <= stall.period <= _MOST_WORKERS


def _explain_period(stall: Stall) -> str:
    """Workers start together and stay in step, so batches come in bursts of one per worker."""
    if _in_bursts(stall):
        return f": the loader's {stall.period} workers deliver in bursts"
    return ""


def _offer(stall: Stall) -> tuple[Remedy, ...]:
    workers = remedies.NO_DATA_WAIT.offer(
        "the loader cannot keep up: raise num_workers above "
        f"{stall.period}, or make one sample cheaper to load"
        if _in_bursts(stall)
        else "give the loader more workers, or a longer prefetch: DataLoader(num_workers=..., "
        "prefetch_factor=...)"
    )
    persistent = remedies.PERSISTENT_WORKERS.offer()
    rarely = stall.period is not None and stall.period > _MOST_WORKERS
    return (persistent, workers) if rarely else (workers, persistent)


RULE = FindingRule(id="data-stalls", title="Stalls for data", find=from_run(find_in))
