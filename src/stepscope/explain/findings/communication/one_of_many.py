"""One of many trainings leaves most of the device idle: several would train in its place."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import LOW, RankEvidence, severity
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.job import SimilarRuns
from stepscope.text.figures import percent
from stepscope.text.words import counted, plural

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
        summary=f"The {evidence.device} computes for only {percent(computes)} of the step. "
        f"{_belongs(similar)}",
        evidence=(
            f"waiting for the CPU and for launches: "
            f"{evidence.budget_ms('idle_launch', 'operators', 'python')}",
            "models trained together need as many launches as one model, whatever their number",
            *_other_share(evidence),
        ),
        remedies=(
            remedies.FUSE.offer(),
            remedies.CUDA_GRAPHS.offer(
                "Capture the step with torch.cuda.graph() if its shapes never change: this also "
                "ends the wait for one model alone"
            ),
        )
        if sure
        else (),
    )


def _belongs(similar: SimilarRuns) -> str:
    if similar.count:
        runs = counted(similar.count, "more run")
        found = plural(similar.count, "was", "were")
        return (
            f"It looks like one of a search: {runs} of {similar.script} with other arguments "
            f"{found} found."
        )
    return f"Its options are those of a search: {', '.join(similar.options)}."


def _other_share(evidence: RankEvidence) -> tuple[str, ...]:
    """Say what training models together cannot take away."""
    data = evidence.budget_share("data_loading")
    if data < LOW:
        return ()
    return (f"waiting for data stays: {evidence.budget_ms('data_loading')}",)


RULE = FindingRule(id="one-of-many", title="One of many small trainings", find=find)
