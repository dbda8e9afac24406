"""Device time spent in kernels too short to use the device well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import LOW, RankEvidence, severity
from stepscope.explain.findings.rule import FindingRule
from stepscope.explain.launches import SHORT_KERNEL_NS
from stepscope.records import remedies

if TYPE_CHECKING:
    from stepscope.records.explanation import Finding


def find(evidence: RankEvidence) -> Finding | None:
    """Most kernels are short, and together they take a visible part of the busy time."""
    launches, timeline = evidence.launches, evidence.timeline
    if evidence.on_host or not launches.kernels:
        return None
    whole = sum(kernel.total_ns for kernel in evidence.kernels) or 1
    busy = 1 - evidence.idle_share(timeline.idle_ns)
    share = launches.short_kernels_ns / whole * busy
    if share < LOW or launches.short_kernels < launches.kernels / 2:
        return None
    return RULE.finding(
        share=share,
        severity="low" if severity(share) == "low" else "medium",
        summary=f"{launches.short_kernels} of {launches.kernels} kernels are shorter than "
        f"{SHORT_KERNEL_NS // 1000} µs; they take {share:.0%} of the step.",
        evidence=(
            f"mean of the short ones: "
            f"{launches.short_kernels_ns / max(1, launches.short_kernels) / 1000:.1f} µs",
            "a kernel that short is mostly start-up and tail: few multiprocessors do work",
        ),
        remedies=(
            remedies.COMPILE.offer("torch.compile fuses elementwise kernels"),
            remedies.BATCH.offer("a larger batch makes each kernel longer"),
        ),
    )


RULE = FindingRule(id="short-kernels", scope="rank", title="Short kernels", find=find)
