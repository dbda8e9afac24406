"""One kernel that takes most of the device's time."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import RankEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.text.figures import duration, percent
from stepscope.text.words import counted

DOMINANT = 0.40
_ADVICE = "Run this kernel in bf16 if it supports that: use torch.autocast"
# Without such instructions bf16 is many times slower.
_CPU_ADVICE = "Use bf16 if this CPU has instructions for it: `stepscope probe` shows whether it has"


def find(evidence: RankEvidence) -> Finding | None:
    """A compute kernel with at least 40% of all device time."""
    whole = sum(kernel.total_ns for kernel in evidence.kernels)
    compute = [kernel for kernel in evidence.kernels if kernel.kind == "compute"]
    if not compute or len(evidence.kernels) < 3:
        return None
    if not whole or compute[0].total_ns < DOMINANT * whole:
        return None
    top = compute[0]
    busy = 1 - evidence.idle_share(evidence.timeline.idle_ns)
    share = top.total_ns / whole * busy
    word = "operator" if evidence.on_host else "kernel"
    return RULE.finding(
        title="One dominant operator" if evidence.on_host else "",
        share=share,
        severity="low",
        summary=f"One {word} takes {percent(top.total_ns / whole)} of all {evidence.device} time. "
        "Speeding up anything else changes little.",
        evidence=(
            top.name,
            f"{counted(top.count, 'call')}, {duration(top.total_ns / top.count)} each",
        ),
        remedies=(remedies.BF16.offer(_CPU_ADVICE if evidence.on_host else _ADVICE),),
    )


RULE = FindingRule(id="dominant-kernel", title="One dominant kernel", find=find)
