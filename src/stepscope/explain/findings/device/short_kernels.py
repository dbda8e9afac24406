"""Device time in kernels too short to use the device well."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import LOW, RankEvidence, severity
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.kernels import SHORT_KERNEL_NS
from stepscope.records.trace import DeviceKind
from stepscope.step.cuda_graphs import find_replayed
from stepscope.text.figures import duration, percent
from stepscope.text.words import counted


def find(evidence: RankEvidence) -> Finding | None:
    """Most kernels are short, and together they take a visible share of the step."""
    launches, timeline = evidence.launches, evidence.timeline
    if evidence.on_host or not launches.kernels:
        return None
    whole = sum(kernel.total_ns for kernel in evidence.kernels) or 1
    busy = 1 - evidence.idle_share(timeline.idle_ns)
    kernels, short, short_ns = _count_outside_graphs(evidence)
    share = short_ns / whole * busy
    if share < LOW or short < kernels / 2:
        return None
    return RULE.finding(
        share=share,
        severity="low" if severity(share) == "low" else "medium",
        summary=f"{percent(share)} of the step goes into kernels shorter than "
        f"{SHORT_KERNEL_NS // 1000} µs: {short:,} of {counted(kernels, 'kernel')}.",
        evidence=(
            "mean duration of these: " + duration(short_ns / max(1, short)),
            "such a kernel mostly starts up and drains, so few multiprocessors work",
        ),
        remedies=(
            remedies.COMPILE.offer("Call torch.compile(model): it fuses elementwise kernels"),
            remedies.BATCH.offer("Use a larger batch: each kernel has more to do"),
        ),
    )


def _count_outside_graphs(evidence: RankEvidence) -> tuple[int, int, int]:
    """Kernels, short ones and their time. In a graph a short kernel is launched with all others,
    and what it costs shows in the gap to its roof."""
    device, launches = evidence.trace.device, evidence.launches
    inside = find_replayed(evidence.trace) & (device.kind == DeviceKind.KERNEL)
    short = inside & (device.dur_ns < SHORT_KERNEL_NS)
    return (
        launches.kernels - int(inside.sum()),
        launches.short_kernels - int(short.sum()),
        launches.short_kernels_ns - int(device.dur_ns[short].sum()),
    )


RULE = FindingRule(id="short-kernels", title="Short kernels", find=find)
