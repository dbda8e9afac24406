"""Device time spent in kernels too short to use the device well."""

from __future__ import annotations

from stepscope.explain.findings.evidence import LOW, Evidence, severity
from stepscope.explain.launches import SHORT_KERNEL_NS
from stepscope.records.explanation import Finding, Remedy


def find(evidence: Evidence) -> Finding | None:
    """Most kernels are short, and together they take a visible part of the busy time."""
    launches, timeline = evidence.launches, evidence.timeline
    if evidence.on_host or not launches.kernels:
        return None
    whole = sum(kernel.total_ns for kernel in evidence.kernels) or 1
    busy = 1 - evidence.idle_share(timeline.idle_ns)
    share = launches.short_kernels_ns / whole * busy
    if share < LOW or launches.short_kernels < launches.kernels / 2:
        return None
    return Finding(
        id="short-kernels",
        title="Short kernels",
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
            Remedy(id="compile", summary="torch.compile fuses elementwise kernels"),
            Remedy(id="batch", summary="a larger batch makes each kernel longer"),
        ),
    )
