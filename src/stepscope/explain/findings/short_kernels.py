"""Device time in kernels too short to use the device well."""

from __future__ import annotations

from stepscope.explain.findings.evidence import LOW, RankEvidence, severity
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.launches import SHORT_KERNEL_NS
from stepscope.records import remedies
from stepscope.records.figures import duration, percent
from stepscope.records.words import counted


def find(evidence: RankEvidence) -> Finding | None:
    """Most kernels are short, and together they take a visible share of the step."""
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
        summary=f"{percent(share)} of the step is kernels shorter than "
        f"{SHORT_KERNEL_NS // 1000} µs: "
        f"{launches.short_kernels:,} of {counted(launches.kernels, 'kernel')}.",
        evidence=(
            "mean duration of these: "
            + duration(launches.short_kernels_ns / max(1, launches.short_kernels)),
            "such a kernel mostly starts up and drains: few multiprocessors do work",
        ),
        remedies=(
            remedies.COMPILE.offer("use torch.compile: it fuses elementwise kernels"),
            remedies.BATCH.offer("use a larger batch: each kernel has more to do"),
        ),
    )


RULE = FindingRule(id="short-kernels", title="Short kernels", find=find)
