"""The parameter server cannot keep up with its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import LOW
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.text.figures import milliseconds, percent, significant
from stepscope.text.words import counted

if TYPE_CHECKING:
    from stepscope.records.parameter_server import TogetherSummary

_BUSY = 0.6  # of the run: above, requests queue for longer than they are served


def find(summary: TogetherSummary) -> Finding | None:
    """A shard that is busy for most of the run, while workers wait for its answers."""
    busiest = max(summary.shards, key=lambda shard: shard.busy_share, default=None)
    if busiest is None or busiest.busy_share < _BUSY:
        return None
    whole = sum(worker.whole_ns for worker in summary.workers)
    share = sum(worker.pull_ns + worker.push_ns for worker in summary.workers) / max(whole, 1)
    if share < LOW:
        return None
    shards = counted(len(summary.shards), "shard")
    return RULE.finding(
        share=share,
        of="run",
        summary=f"Workers spend {percent(share)} of their time on pulls and pushes. Shard "
        f"{busiest.shard} of {shards} is busy for {percent(busiest.busy_share)} of the run.",
        evidence=(
            f"{significant(busiest.mean_queue or 0.0)} requests wait at it on average, each for "
            f"{milliseconds(busiest.mean_wait_ms or 0.0)}",
        ),
        remedies=(
            remedies.MORE_SHARDS.offer(),
            remedies.COMPRESS_PUSHES.offer(),
        ),
    )


RULE = FindingRule(id="server-bound", scope="together", title="Server-bound", find=find)
