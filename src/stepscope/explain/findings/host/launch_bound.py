"""Many small kernels: the device waits for each launch."""

from __future__ import annotations

import numpy as np

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import MEDIUM, RankEvidence, places
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.explanation import GAP_CAUSES
from stepscope.step.cuda_graphs import find_gaps_in_replays
from stepscope.text.figures import duration, percent
from stepscope.text.words import counted

SMALL_GAP_NS = 100_000
_CAUSES = tuple(GAP_CAUSES.index(cause) for cause in ("launch", "operators", "python"))


def find(evidence: RankEvidence) -> Finding | None:
    """Small gaps between kernels that are shorter than the time between their launches."""
    launches, gaps = evidence.launches, evidence.gaps
    if evidence.on_host or not launches.calls or not launches.kernels:
        return None
    sizes = gaps.end_ns - gaps.start_ns
    small = (sizes < SMALL_GAP_NS) & np.isin(gaps.cause, _CAUSES)
    small &= ~find_gaps_in_replays(evidence.trace, gaps.end_ns)
    share = evidence.idle_share(int(sizes[small].sum()))
    kernel_ns = sum(kernel.total_ns for kernel in evidence.kernels) / launches.device_events
    interval_ns = evidence.whole.span_ns / launches.device_events
    if share < MEDIUM or launches.short_kernels < launches.kernels / 2:
        return None
    return RULE.finding(
        share=share,
        summary=f"{percent(share)} of the step is lost in small gaps between kernels because "
        "launching a kernel takes longer than running it.",
        evidence=(
            f"{counted(int(small.sum()), 'gap')} under {SMALL_GAP_NS // 1000} µs: "
            f"{evidence.step_ms(share)}",
            f"a kernel or copy runs {duration(kernel_ns)} on average, and one starts every "
            f"{duration(interval_ns)}",
            f"{launches.short_kernels:,} of {counted(launches.kernels, 'kernel')} run for less "
            "than 10 µs",
            *_warn_of_profiler(evidence),
        ),
        where=places(evidence, _CAUSES),
        remedies=(
            remedies.REDUCE_OVERHEAD.offer(),
            remedies.CUDA_GRAPHS.offer(),
            remedies.COMPILE.offer("Call torch.compile(model): it fuses small kernels"),
            remedies.FUSED_OPTIMIZER.offer("Pass fused=True or foreach=True to the optimizer"),
            remedies.BATCH.offer("Use a larger batch: each kernel runs longer per launch"),
        ),
    )


def _warn_of_profiler(evidence: RankEvidence) -> tuple[str, ...]:
    if evidence.budget.basis in ("measured", "corrected"):
        return ()
    return ("the profiler slows every launch: without it this share is smaller",)


RULE = FindingRule(id="launch-bound", title="Launch-bound", find=find)
