"""A CPU step of operators so short that calling them costs more than their work."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.cpu_use import CpuUse, looked
from stepscope.explain.findings.evidence import LOW, RankEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.text.figures import duration, percent, significant

_SPINNING = 1.4  # cores kept busy by operators that threads cannot share
_SHORT = 0.25  # of the time in long operators: with more, threads have work to share


def find(evidence: RankEvidence) -> Finding | None:
    """The time of operators beyond their arithmetic and bytes, in their fast calls."""
    use = evidence.cpu
    if use is None:
        return None
    share = use.overhead_share * evidence.budget_share("compute")
    if share < LOW:
        return None
    spinning = _describe_spinning(use)
    return RULE.finding(
        share=share,
        summary=f"{percent(share)} of the step goes into calling {use.events:,.0f} operators, not "
        "into their arithmetic.",
        evidence=(
            f"overhead: {evidence.step_ms(share)}, {duration(use.overhead_ns / use.events)} per "
            "operator",
            *([spinning] if spinning else []),
            *_describe_unknown(use),
        ),
        remedies=(
            remedies.BATCH.offer("Use a larger batch: each operator does more work per call"),
            remedies.FUSED_OPTIMIZER.offer(
                "Pass fused=True to the optimizer: one operator updates all parameters"
            ),
            *([remedies.ONE_THREAD.offer()] if spinning else []),
        ),
    )


def _describe_spinning(use: CpuUse) -> str:
    """Threads that wait for the next short operator keep their cores busy doing nothing."""
    load, plain = looked(use)
    if load is None or plain is None or load.threads < 2 or use.long_share >= _SHORT:
        return ""
    if (plain.used_cores or 0.0) < _SPINNING:
        return ""
    return (
        f"the process keeps {significant(plain.used_cores or 0.0)} cores busy although its "
        f"operators are too short to share: its {load.threads} threads spin between them"
    )


def _describe_unknown(use: CpuUse) -> list[str]:
    if use.priced_share >= 0.5:
        return []
    return [
        f"the work of {percent(1 - use.priced_share)} of the operators' time is not known: there, "
        "only calls under 5 µs count as overhead"
    ]


RULE = FindingRule(id="dispatch-bound", title="Operators too small", find=find)
