"""Ranks that are started as one job but do not exchange gradients."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import JobEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.job.rank_part import train_apart
from stepscope.records.explanation import Severity
from stepscope.records.job import Membership
from stepscope.text.figures import size
from stepscope.text.words import counted

_WRAP = remedies.WRAP_MODEL.offer()
_JOIN = remedies.START_AS_JOB.offer()


def find(evidence: JobEvidence) -> Finding | None:
    """Only where every process is known to train and to exchange no gradients."""
    if not train_apart(evidence.job.members):
        return None
    members = [member for member in evidence.job.members if member is not None]
    words = _list_evidence(members)
    if all(member.shared for member in members):
        return RULE.finding(
            title="Shared memory",
            share=0.0,
            severity="none",
            of="work",
            summary=f"{len(members)} processes train one model in shared memory, without a process "
            "group. None waits for another.",
            evidence=words,
        )
    started_as_job = max(member.world_size for member in members) > 1
    severity, summary = _judge_job(members) if started_as_job else _judge_separate(members)
    return RULE.finding(
        share=1 - 1 / len(members),
        severity=severity,
        of="work",
        summary=summary,
        evidence=words,
        remedies=(_WRAP if started_as_job else _JOIN,),
    )


def _judge_job(members: list[Membership]) -> tuple[Severity, str]:
    """Started as one job: each rank repeats, or contradicts, the others' work."""
    at_times = any(member.calls_before and not member.exchanged_bytes for member in members)
    unless = " unless models are averaged in other steps" if at_times else ""
    model = f"each trains its own model{unless}"
    summary = f"The {len(members)} ranks exchange no gradients: {model}."
    return "medium" if at_times else "high", summary


def _judge_separate(members: list[Membership]) -> tuple[Severity, str]:
    """Started one by one, as in a sweep: this may be intended."""
    known = all(member.shared is False for member in members)
    consequence = (
        "They share no parameters, so each trains its own model"
        if known
        else "Whether they share parameters is not known"
    )
    return "low", f"{len(members)} processes train without a process group. {consequence}."


def _list_evidence(members: list[Membership]) -> tuple[str, ...]:
    steps = ", ".join(str(member.steps) for member in members[:8])
    sent = max(member.exchanged_bytes or 0 for member in members)
    sizes = [member.trained_bytes for member in members if member.trained_bytes]
    trained = f", but {size(max(sizes))} of parameters are trained" if sizes else ""
    groups = max(member.groups for member in members)
    group_words = counted(groups, "process group") if groups else "no process group"
    pids = ", ".join(str(member.pid) for member in members[:8] if member.pid is not None)
    return (
        f"a step exchanges {size(sent)}{trained}",
        f"{group_words}; no DDP, FSDP, DTensor, pipeline stage or RPC",
        f"steps per rank: {steps}" + (f" (process ids {pids})" if pids else ""),
    )


RULE = FindingRule(
    id="not-training-together", scope="job", title="Ranks do not train together", find=find
)
