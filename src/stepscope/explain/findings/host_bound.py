"""The device waits because the host has not launched anything: Python and framework time."""

from __future__ import annotations

from stepscope.explain.findings.evidence import LOW, RankEvidence, places, severity
from stepscope.explain.findings.rule import FindingRule
from stepscope.records import remedies
from stepscope.records.explanation import GAP_CAUSES, Finding, Remedy

_OPERATORS, _PYTHON = GAP_CAUSES.index("operators"), GAP_CAUSES.index("python")


def find(evidence: RankEvidence) -> Finding | None:
    """Host idle while the feeding threads were in operators or in Python."""
    share = evidence.budget_share("operators", "python")
    if share < LOW:
        return None
    if evidence.on_host:
        summary = (
            f"{share:.0%} of the step runs no operator: Python between the operators takes "
            f"{evidence.budget_ms('operators', 'python')}."
        )
    else:
        summary = (
            f"the {evidence.device} has nothing queued for {share:.0%} of the step: "
            "the host launches work too slowly."
        )
    return RULE.finding(
        title="Python between operators" if evidence.on_host else "Host-bound",
        share=share,
        severity=severity(share),
        summary=summary,
        evidence=tuple(_evidence(evidence)),
        where=places(evidence, (_OPERATORS, _PYTHON)),
        remedies=_remedies(evidence),
    )


def _evidence(evidence: RankEvidence) -> list[str]:
    launches = evidence.launches
    parts = {"operators": "inside operators", "python": "in Python outside operators"}
    lines = [
        f"idle while the host was {parts[part]}: {evidence.budget_ms(part)}"
        for part in sorted(parts, key=evidence.budget_share, reverse=True)
    ]
    if launches.queue_empty_share is not None:
        lines.append(
            f"nothing was queued for {launches.queue_empty_share:.0%} of the time "
            f"(mean queue {launches.queue_mean:.1f}, longest {launches.queue_max})"
        )
    if evidence.budget.basis == "measured":
        lines.append("shares are of the step as measured without the profiler")
    elif evidence.budget.basis == "corrected":
        lines.append(
            "shares are of the step with the profiler's cost taken out "
            "(`stepscope run` measures the real step too)"
        )
    else:
        lines.append(
            "the profiler itself slows the host: without it this share is smaller "
            "(`stepscope run` measures the real step too)"
        )
    return lines


def _remedies(evidence: RankEvidence) -> tuple[Remedy, ...]:
    if evidence.on_host:
        return (
            remedies.COMPILE.offer("torch.compile fuses operators and removes Python"),
            remedies.BATCH.offer("a larger batch gives each operator more to do"),
        )
    return (
        remedies.CUDA_GRAPHS.offer("replay the step as one CUDA graph: one launch per step"),
        remedies.COMPILE.offer("torch.compile fuses operators and launches fewer kernels"),
        remedies.BATCH.offer("a larger batch makes kernels longer at the same launch cost"),
        remedies.FUSED_OPTIMIZER.offer("a fused optimizer replaces hundreds of launches"),
    )


RULE = FindingRule(id="host-bound", scope="rank", title="Host-bound", find=find)
