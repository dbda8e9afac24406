"""The device waits because the host has not launched anything: Python and framework time."""

from __future__ import annotations

from stepscope.explain.findings.evidence import LOW, Evidence, places, severity
from stepscope.records.explanation import GAP_CAUSES, Finding, Remedy

_OPERATORS, _PYTHON = GAP_CAUSES.index("operators"), GAP_CAUSES.index("python")


def find(evidence: Evidence) -> Finding | None:
    """Host idle while the feeding threads were in operators or in Python."""
    share = evidence.part("operators", "python")
    if share < LOW:
        return None
    if evidence.on_host:
        summary = (
            f"{share:.0%} of the step runs no operator: Python between the operators takes "
            f"{evidence.part_ms('operators', 'python')}."
        )
    else:
        summary = (
            f"the {evidence.device} has nothing queued for {share:.0%} of the step: "
            "the host launches work too slowly."
        )
    return Finding(
        id="host-bound",
        title="Python between operators" if evidence.on_host else "Host-bound",
        share=share,
        severity=severity(share),
        summary=summary,
        evidence=tuple(_evidence(evidence)),
        where=places(evidence, (_OPERATORS, _PYTHON)),
        remedies=_remedies(evidence),
    )


def _evidence(evidence: Evidence) -> list[str]:
    launches = evidence.launches
    parts = {"operators": "inside operators", "python": "in Python outside operators"}
    lines = [
        f"idle while the host was {parts[part]}: {evidence.part_ms(part)}"
        for part in sorted(parts, key=evidence.part, reverse=True)
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


def _remedies(evidence: Evidence) -> tuple[Remedy, ...]:
    if evidence.on_host:
        return (
            Remedy(id="compile", summary="torch.compile fuses operators and removes Python"),
            Remedy(id="batch", summary="a larger batch gives each operator more to do"),
        )
    return (
        Remedy(id="cuda-graphs", summary="replay the step as one CUDA graph: one launch per step"),
        Remedy(id="compile", summary="torch.compile fuses operators and launches fewer kernels"),
        Remedy(id="batch", summary="a larger batch makes kernels longer at the same launch cost"),
        Remedy(id="optimizer", summary="a fused optimizer replaces hundreds of launches"),
    )
