"""A rank, or a link, that all other ranks wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records import remedies
from stepscope.records.figures import factor, milliseconds, percent
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.explain.findings.evidence import JobEvidence
    from stepscope.records.explanation import Remedy
    from stepscope.records.job import Cause, Job, Straggler

_REMEDIES: dict[Cause, tuple[Remedy, ...]] = {
    "compute": (
        remedies.CHECK_HOST.offer(),
        remedies.NO_STRAGGLER.offer("bring this rank up to the pace of the others"),
        remedies.BALANCE.offer("if this rank has more work than the others, balance it"),
    ),
    "input": (
        remedies.NO_DATA_WAIT.offer("feed this rank faster: more loader workers, cached data"),
        remedies.CHECK_STORAGE.offer("check whether its host reads from slower storage"),
    ),
    "link": (
        remedies.BANDWIDTH.offer("look for the slow link: cable, port, transport, routes"),
        remedies.CHECK_NCCL.offer(
            "`stepscope run --nccl-debug` shows the transport between each pair of ranks"
        ),
    ),
}
_WORDS: dict[Cause, str] = {
    "compute": "takes {times} times as long as the other ranks for its own work",
    "input": "waits for its data and takes {times} times as long as the other ranks",
    "link": "transfers take {times} times as long as they should, although ranks arrive together",
}


def find(evidence: JobEvidence) -> Finding | None:
    """The costliest straggler leads; the others are evidence."""
    job = evidence.job
    if not job.stragglers.ranks:
        return None
    worst, *others = job.stragglers.ranks
    step_ms = _choose_step_ms(job, worst)
    if not step_ms:
        return None
    share = min(1.0, worst.cost_ms / step_ms)
    times = factor(worst.slowdown)
    return RULE.finding(
        title="" if worst.rank is not None else "Slow link",
        share=share,
        summary=f"{_name(worst)} {_WORDS[worst.cause].format(times=times)}; without this, a step "
        f"would be {milliseconds(worst.cost_ms)} ({percent(share)}) shorter.",
        evidence=(
            *worst.evidence,
            *(_describe_other(straggler) for straggler in others[:3]),
            *_describe_arrivals(job, worst),
        ),
        remedies=_REMEDIES[worst.cause],
        rank=worst.rank,
    )


def _choose_step_ms(job: Job, worst: Straggler) -> float:
    """The step of record. Without one, the slowest rank's typical step for a slow rank, and the
    median over steps of the slowest rank for a slow link."""
    if job.step_ms:
        return job.step_ms
    if worst.rank is not None:
        return max(times.step_ms for times in job.times)
    steps = job.step_ns[(job.step_ns > 0).all(axis=1)]
    return float(np.median(steps.max(axis=1))) / 1e6 if len(steps) else 0.0


def _name(straggler: Straggler) -> str:
    if straggler.rank is not None:
        return f"rank {straggler.rank}"
    return f"group {straggler.group}:" if straggler.group else "the group's"


def _describe_other(straggler: Straggler) -> str:
    return f"{_name(straggler)} is slow too: {straggler.cause}, {factor(straggler.slowdown)} times"


def _describe_arrivals(job: Job, worst: Straggler) -> list[str]:
    """How often it arrived last, where clocks are precise enough to say."""
    for row in job.arrivals:
        if row.rank == worst.rank and row.times_last:
            return [
                f"arrives last in {row.times_last} of {counted(row.of, 'collective')}, "
                f"typically {milliseconds(row.lead_ns / 1e6)} after the others"
            ]
    return []


RULE = FindingRule(id="straggler", scope="job", title="Straggler", find=find)
