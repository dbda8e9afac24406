"""Loops over the same tensors that torch.compile did not make one."""

from __future__ import annotations

from stepscope.explain.findings.evidence import LOW, RankEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records import remedies
from stepscope.text.figures import milliseconds, size

_MOST = 4


def find(evidence: RankEvidence) -> Finding | None:
    """Neighbours that read what the one before has just made or read, by the memory's rate."""
    regions = evidence.compiled.regions if evidence.compiled else ()
    pairs = [pair for region in regions for pair in region.unfused if pair.ms is not None]
    pairs.sort(key=lambda pair: -(pair.ms or 0.0))
    step_ms = evidence.budget.step_ms
    cost_ms = sum(pair.ms or 0.0 for pair in pairs)
    if not step_ms or cost_ms / step_ms < LOW:
        return None
    share = min(1.0, cost_ms / step_ms)
    return RULE.finding(
        share=share,
        severity="low",
        summary="torch.compile left pairs of kernels unfused: the second reads again what the "
        f"first had just used. This costs up to {evidence.step_ms(share)}.",
        evidence=tuple(
            (
                f"{pair.first}, then {pair.second}: {size(pair.size_bytes)}, "
                f"{milliseconds(pair.ms or 0.0)} per step"
            )
            for pair in pairs[:_MOST]
        ),
        where=tuple(r.lines[0].place for r in regions if r.unfused and r.lines)[:_MOST],
        remedies=(remedies.FUSE_NEIGHBOURS.offer(),),
    )


RULE = FindingRule(id="not-fused", title="Kernels not fused", find=find)
