"""Calls that make the host wait for the device: afterwards the device waits for the host."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import LOW, RankEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.explanation import Place
from stepscope.text.figures import duration, percent
from stepscope.text.words import counted


def find(evidence: RankEvidence) -> Finding | None:
    """Idle gaps in which a blocking call returned: it had emptied the queue."""
    idle = evidence.idle
    share = evidence.idle_share(idle.after_sync_ns)
    if evidence.on_host or share < LOW:
        return None
    calls = evidence.syncs[:3]
    return RULE.finding(
        share=share,
        summary=f"The {evidence.device} is idle {percent(share)} of the step because calls make "
        "the CPU wait for it: .item(), .cpu(), printing a tensor or synchronize().",
        evidence=(
            f"{counted(idle.after_sync_gaps, 'gap')} after blocking calls: "
            f"{evidence.step_ms(share)}",
            *(
                call.name
                + (f" in {call.operator}" if call.operator else "")
                + f": {counted(call.count, 'call')}, "
                f"{duration(call.total_ns)} on the CPU in the whole trace"
                for call in calls
            ),
        ),
        where=tuple(
            Place(file=call.file, line=call.line)
            for call in calls
            if call.file is not None and call.line is not None
        ),
        remedies=(remedies.NO_SYNC.offer(),),
    )


RULE = FindingRule(id="blocking-syncs", title="Blocking calls", find=find)
