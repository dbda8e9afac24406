"""Evaluation, or other work beside the training, takes much of the run."""

from __future__ import annotations

from typing import NamedTuple

from stepscope import changes as remedies
from stepscope.changes.change import Change
from stepscope.explain.findings.evidence import beside_steps, from_run, wanted_work_severity
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.run import WITHOUT_GRADIENTS, RankRun, StallCause
from stepscope.text.figures import percent


class _Words(NamedTuple):
    title: str
    subject: str
    remedies: tuple[Change, ...]


_WORDS: dict[StallCause, _Words] = {
    "evaluation": _Words("Evaluation", "Evaluation takes", (remedies.EVALUATE_LESS,)),
    "collecting": _Words(
        "Collecting experience", "Collecting experience takes", (remedies.MORE_ENVIRONMENTS,)
    ),
    "generating": _Words(
        "Generating samples", "Generating samples takes", (remedies.GENERATE_LESS,)
    ),
    "without_gradients": _Words(
        "Passes without gradients", "Passes without gradients take", (remedies.INFERENCE_MODE,)
    ),
}


def find_in(run: RankRun) -> Finding | None:
    """Work beside the training inside steps and between epochs, as a share of the training loop."""
    kind, work = max(
        ((kind, beside_steps(run, kind)) for kind in WITHOUT_GRADIENTS),
        key=lambda each: each[1].share,
    )
    words = _WORDS[kind]
    severity = wanted_work_severity(work.share)
    if severity is None:
        return None
    return RULE.finding(
        share=work.share,
        of="run",
        severity=severity,
        title=words.title,
        summary=f"{words.subject} {percent(work.share)} of the training loop{work.how_often}.",
        evidence=work.evidence,
        where=work.where,
        remedies=tuple(remedy.offer() for remedy in words.remedies),
    )


RULE = FindingRule(id="evaluation-share", title="Evaluation", find=from_run(find_in))
