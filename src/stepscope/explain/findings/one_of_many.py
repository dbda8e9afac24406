"""One of many trainings leaves most of the device idle: several would train in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import LOW, RankEvidence, severity
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records import remedies
from stepscope.records.figures import percent
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.records.job import SimilarRuns

_MOSTLY = 0.5  # of the step


def find(evidence: RankEvidence) -> Finding | None:
    """The GPU computes for less than half of the step, nothing but the host holds it back, and the
    run belongs to a search."""
    if evidence.on_host or (evidence.trace.world_size or 1) > 1 or evidence.collectives:
        return None
    idle = evidence.budget_share("idle_launch", "operators", "python")
    similar = evidence.similar
    if idle < _MOSTLY or similar is None or not (similar.count or similar.options):
        return None
    computes = evidence.budget_share("compute")
    sure = similar.count > 0
    return RULE.finding(
        share=idle,
        severity=severity(idle) if sure else "low",
        summary=f"the {evidence.device} computes for {percent(computes)} of the step, and this run "
        f"{_belongs(similar)}: train several of these models as one.",
        evidence=(
            f"waiting for the host and for launches: "
            f"{evidence.budget_ms('idle_launch', 'operators', 'python')}",
            "an array of models has as many launches as one model, whatever their number",
            *_other_share(evidence),
        ),
        remedies=(
            remedies.FUSE.offer(),
            remedies.CUDA_GRAPHS.offer(
                "where every step has the same shapes, a CUDA graph also ends the wait, and one "
                "model alone keeps its program"
            ),
        )
        if sure
        else (),
    )


def _belongs(similar: SimilarRuns) -> str:
    if similar.count:
        runs = counted(similar.count, "run")
        return f"is one of many: {runs} of {similar.script} with other arguments beside it"
    return f"may be one of many (it has {', '.join(similar.options)}); if so"


def _other_share(evidence: RankEvidence) -> tuple[str, ...]:
    """What an array cannot take away."""
    data = evidence.budget_share("data_loading")
    if data < LOW:
        return ()
    return (f"waiting for data stays: {evidence.budget_ms('data_loading')}",)


RULE = FindingRule(id="one-of-many", title="One of many small trainings", find=find)
