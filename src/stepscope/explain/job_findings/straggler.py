"""A rank, or a link, that everybody waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.findings.evidence import severity
from stepscope.records.explanation import Finding, Remedy
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.job import Cause, Job, Straggler
    from stepscope.records.strategies import Strategy

_REMEDIES: dict[Cause, tuple[Remedy, ...]] = {
    "compute": (
        Remedy(
            id="check-host",
            summary="on its host look for other processes, a throttled or smaller device, wrong "
            "CPU binding; try the rank on another host",
        ),
        Remedy(id="no-straggler", summary="bring this rank up to the pace of the others"),
        Remedy(id="balance", summary="if its share of the work is larger, balance it"),
    ),
    "input": (
        Remedy(id="no-data-wait", summary="feed this rank faster: more workers, cached data"),
        Remedy(id="check-storage", summary="see whether its host reads from slower storage"),
    ),
    "link": (
        Remedy(id="bandwidth", summary="look for the slow link: cable, port, transport, routes"),
        Remedy(id="check-nccl", summary="`--nccl-debug` shows which transport each pair took"),
    ),
}
_WORDS: dict[Cause, str] = {
    "compute": "takes {slowdown:.2f} times as long as the other ranks for its own work",
    "input": "waits for its data and takes {slowdown:.2f} times as long as the other ranks",
    "link": "transfers take {slowdown:.2f} times what they should although ranks arrive together",
}


def find(job: Job, _strategies: Sequence[Strategy]) -> Finding | None:
    """The costliest straggler leads; the others are evidence."""
    found = job.stragglers.ranks
    if not found:
        return None
    worst = found[0]
    step_ms = _step_ms(job, worst)
    if not step_ms:
        return None
    share = min(1.0, worst.cost_ms / step_ms)
    return Finding(
        id="straggler",
        title="Straggler" if worst.rank is not None else "Slow link",
        share=share,
        severity=severity(share),
        summary=f"{_who(worst)} {_WORDS[worst.cause].format(slowdown=worst.slowdown)}; "
        f"without that a step would be {worst.cost_ms:.2f} ms ({share:.0%}) shorter.",
        evidence=(*worst.evidence, *(_also(each) for each in found[1:4]), *_last(job, worst)),
        remedies=_REMEDIES[worst.cause],
        rank=worst.rank,
    )


def _step_ms(job: Job, worst: Straggler) -> float:
    """Of record; else the slowest rank's typical step, of which a rank's cost is; else step by
    step."""
    if job.step_ms:
        return job.step_ms
    if worst.rank is not None:
        return max(each.step_ms for each in job.times)
    steps = job.step_ns[(job.step_ns > 0).all(axis=1)]
    return float(np.median(steps.max(axis=1))) / 1e6 if len(steps) else 0.0


def _who(straggler: Straggler) -> str:
    if straggler.rank is not None:
        return f"rank {straggler.rank}"
    return f"group {straggler.group}:" if straggler.group else "the group's"


def _also(straggler: Straggler) -> str:
    return f"{_who(straggler)} too: {straggler.cause}, {straggler.slowdown:.2f} times"


def _last(job: Job, worst: Straggler) -> list[str]:
    """How often it was the last to come, where clocks are good enough."""
    for row in job.arrivals:
        if row.rank == worst.rank and row.times_last:
            lead = row.lead_ns / 1e6
            return [
                f"last to arrive in {row.times_last} of {counted(row.of, 'collective')}, "
                f"typically by {lead:.2f} ms"
            ]
    return []
