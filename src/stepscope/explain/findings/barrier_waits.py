"""Workers of a parameter server wait for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import LOW
from stepscope.explain.findings.rule import FindingRule
from stepscope.explain.together.words import name_blockers
from stepscope.records import remedies
from stepscope.records.figures import percent

if TYPE_CHECKING:
    from stepscope.explain.findings.rule import Finding
    from stepscope.records.together_summary import TogetherSummary

_TRANSIENT = (
    remedies.BOUNDED_STALENESS.offer(),
    remedies.CHECK_HOST.offer("look for what holds up one worker at a time: processes, disks"),
)
_PERSISTENT = (
    remedies.NO_STRAGGLER.offer("bring the slow worker up to the pace of the others"),
    remedies.BALANCE.offer("give the slow worker less work per step, or leave it out"),
    remedies.NO_BARRIER.offer(),
)


def find(summary: TogetherSummary) -> Finding | None:
    """Blocked time that a consistency which pays still has, or that a barrier costs."""
    straggling = summary.straggling
    if summary.verdict == "does not pay" or straggling is None or summary.blocked_share < LOW:
        return None
    share = percent(summary.blocked_share)
    return RULE.finding(
        share=summary.blocked_share,
        of="run",
        summary=f"workers wait for others for {share} of their time ({summary.consistency}); "
        f"{summary.why}.",
        evidence=name_blockers(summary),
        remedies=_PERSISTENT if straggling.kind == "persistent" else _TRANSIENT,
    )


RULE = FindingRule(id="barrier-waits", scope="together", title="Workers wait", find=find)
