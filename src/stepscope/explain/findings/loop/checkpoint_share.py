"""Saving checkpoints takes much of the run."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import beside_steps, from_run, wanted_work_severity
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.run import RankRun
from stepscope.text.figures import percent


def find_in(run: RankRun) -> Finding | None:
    """Saving inside steps and between epochs, as a share of the training loop."""
    work = beside_steps(run, "checkpoint")
    severity = wanted_work_severity(work.share)
    if severity is None:
        return None
    return RULE.finding(
        share=work.share,
        of="run",
        severity=severity,
        summary=f"Saving checkpoints takes {percent(work.share)} of the training loop"
        f"{work.how_often}.",
        evidence=work.evidence,
        where=work.where,
        remedies=(
            remedies.ASYNC_CHECKPOINT.offer(),
            remedies.LESS_OFTEN.offer("Save less often, or to a faster disk"),
        ),
    )


RULE = FindingRule(id="checkpoint-share", title="Checkpoints", find=from_run(find_in))
