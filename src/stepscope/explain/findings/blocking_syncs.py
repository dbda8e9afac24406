"""Calls that make the host wait for the device, after which the device waits for the host."""

from __future__ import annotations

from stepscope.explain.findings.evidence import LOW, RankEvidence, severity
from stepscope.explain.findings.rule import FindingRule
from stepscope.records import remedies
from stepscope.records.explanation import Finding, Place
from stepscope.records.words import counted


def find(evidence: RankEvidence) -> Finding | None:
    """Idle gaps in which a blocking call returned: the queue had run dry because of it."""
    idle = evidence.idle
    share = evidence.idle_share(idle.after_sync_ns)
    if evidence.on_host or share < LOW:
        return None
    calls = evidence.syncs[:3]
    return RULE.finding(
        share=share,
        severity=severity(share),
        summary=f"{share:.0%} of the step is idle right after the host waited for the "
        f"{evidence.device}: .item(), .cpu(), print of a tensor or an explicit synchronize.",
        evidence=(
            f"{counted(idle.after_sync_gaps, 'gap')} opened by a blocking call, "
            f"{evidence.step_ms(share)}",
            *(
                call.name
                + (f" in {call.operator}" if call.operator else "")
                + f": {counted(call.count, 'call')}, "
                f"{call.total_ns / 1e6:.2f} ms on the host in the whole trace"
                for call in calls
            ),
        ),
        where=tuple(
            Place(file=call.file, line=call.line)
            for call in calls
            if call.file is not None and call.line is not None
        ),
        remedies=(
            remedies.NO_SYNC.offer(
                "keep values on the device and read them every N steps; "
                "copy with non_blocking=True",
            ),
        ),
    )


RULE = FindingRule(id="blocking-syncs", scope="rank", title="Blocking synchronisation", find=find)
