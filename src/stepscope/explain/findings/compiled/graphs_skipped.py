"""CUDA graphs were asked for, and torch.compile leaves some graphs out."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import RankEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.compiled import RegionTime
from stepscope.text.words import counted, plural

_MOST = 4


def find(evidence: RankEvidence) -> Finding | None:
    """Graphs of the step that are launched kernel by kernel although they were to be replayed."""
    regions = evidence.compiled.regions if evidence.compiled else ()
    skipped = [region for region in regions if region.not_graphed]
    step_ms = evidence.budget.step_ms
    if evidence.on_host or not skipped or not step_ms:
        return None
    waits_ms = sum(region.gaps_ms or 0.0 for region in skipped)
    share = min(1.0, waits_ms / step_ms)
    return RULE.finding(
        share=share,
        summary=f"{len(skipped)} of {counted(len(regions), 'compiled graph')} "
        f"{plural(len(skipped), 'is', 'are')} not replayed as a CUDA graph. The "
        f"{evidence.device} waits between {plural(len(skipped), 'its', 'their')} kernels for "
        f"{evidence.step_ms(share)}.",
        evidence=tuple(_describe(region) for region in skipped[:_MOST]),
        where=tuple(region.lines[0].place for region in skipped if region.lines)[:_MOST],
        remedies=(remedies.GRAPHABLE.offer(),),
    )


def _describe(region: RegionTime) -> str:
    which = "backward" if region.backward else "forward"
    return f"region {region.region or 'not known'}, {which}: {region.not_graphed}"


RULE = FindingRule(id="graphs-skipped", title="CUDA graphs skipped", find=find)
