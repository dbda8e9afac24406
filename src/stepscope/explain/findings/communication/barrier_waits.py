"""Workers of a parameter server wait for each other."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import LOW
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.parameter_server import name_blockers
from stepscope.records.change_values import Consistency
from stepscope.records.explanation import Remedy
from stepscope.records.parameter_server import Straggling, TogetherSummary
from stepscope.text.figures import percent

_LOOK = remedies.CHECK_HOST.offer(
    "Look for what delays one worker at a time: other processes, disks, batches that take longer"
)
_LARGER_BOUND = remedies.BOUNDED_STALENESS.offer(
    "Raise the bound, such as bounded:3 to bounded:8: workers may then run further ahead"
)
_PERSISTENT = (
    remedies.NO_STRAGGLER.offer(
        "Find what slows this worker: other processes, low clocks or a smaller device"
    ),
    remedies.BALANCE.offer("Give the slow worker smaller batches, or leave it out"),
    remedies.NO_BARRIER.offer(),
)


def find(summary: TogetherSummary) -> Finding | None:
    """Blocked time that a consistency which pays still has, or that a barrier costs."""
    straggling = summary.straggling
    if summary.verdict == "does not pay" or straggling is None or summary.blocked_share < LOW:
        return None
    if Consistency.parse(summary.consistency).largest_gap is None:
        return None  # nobody waits for others: what is left is asking for permission
    runs_ahead = summary.verdict != "barrier"
    share = f"for {percent(summary.blocked_share)} of their time ({summary.consistency})"
    # What a barrier costs is told with what running ahead would change.
    return RULE.finding(
        share=summary.blocked_share,
        of="run",
        summary=f"Workers still wait for others {share}."
        if runs_ahead
        else f"Workers wait for others {share}. {summary.why}",
        evidence=(*((summary.why,) if runs_ahead else ()), *name_blockers(summary)),
        remedies=_choose_remedies(straggling, runs_ahead=runs_ahead),
    )


def _choose_remedies(straggling: Straggling, *, runs_ahead: bool) -> tuple[Remedy, ...]:
    if straggling.kind == "persistent":
        return _PERSISTENT
    return (_LARGER_BOUND if runs_ahead else remedies.BOUNDED_STALENESS.offer(), _LOOK)


RULE = FindingRule(id="barrier-waits", scope="together", title="Workers wait", find=find)
