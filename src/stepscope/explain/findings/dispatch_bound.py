"""A CPU step made of operators so short that calling them costs more than their work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import LOW, RankEvidence, severity
from stepscope.explain.findings.rule import FindingRule
from stepscope.explain.machine_load import looked
from stepscope.records import remedies

if TYPE_CHECKING:
    from stepscope.explain.cpu_use import CpuUse
    from stepscope.records.explanation import Finding

_SPINNING = 1.4  # cores kept busy by operators that threads cannot share
_SHORT = 0.25  # of the time in long operators: with more than that, threads have work


def find(evidence: RankEvidence) -> Finding | None:
    """What operators take beyond their arithmetic and bytes, at their quick pace."""
    use = evidence.cpu
    if use is None:
        return None
    share = use.overhead_share * evidence.budget_share("compute")
    if share < LOW:
        return None
    spins = _spinning(use)
    return RULE.finding(
        share=share,
        severity=severity(share),
        summary=f"{share:.0%} of the step is the cost of calling {use.events:,.0f} operators, not "
        "their arithmetic.",
        evidence=(
            f"beyond their work operators take {evidence.step_ms(share)}, "
            f"{use.overhead_ns / use.events / 1e3:.1f} µs each",
            *([spins] if spins else []),
            *_unknown(use),
        ),
        remedies=(
            remedies.COMPILE.offer("torch.compile joins operators into few"),
            remedies.BATCH.offer("a larger batch gives each operator more to do"),
            remedies.FUSED_OPTIMIZER.offer("fused=True updates all parameters with one operator"),
            *(
                [remedies.ONE_THREAD.offer("OMP_NUM_THREADS=1: nothing here is shared")]
                if spins
                else []
            ),
        ),
    )


def _spinning(use: CpuUse) -> str:
    """Threads that wait for short parallel regions keep their cores busy doing nothing."""
    load, plain = looked(use)
    if load is None or plain is None or load.threads < 2 or use.long_share >= _SHORT:
        return ""
    if (plain.used_cores or 0.0) < _SPINNING:
        return ""
    return (
        f"the process keeps {plain.used_cores:.1f} cores busy with operators too short to share: "
        f"its {load.threads} threads spin between them"
    )


def _unknown(use: CpuUse) -> list[str]:
    if use.priced_share >= 0.5:
        return []
    return [
        f"the work of {1 - use.priced_share:.0%} of the operators' time is not known: only calls "
        "under 5 µs count there"
    ]


RULE = FindingRule(id="dispatch-bound", scope="rank", title="Operators too small", find=find)
