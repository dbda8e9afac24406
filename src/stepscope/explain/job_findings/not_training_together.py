"""Ranks that were started as one job and train without sending each other what they learn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.membership import train_apart
from stepscope.records.explanation import Finding, Remedy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.explanation import Severity
    from stepscope.records.job import Job, Membership
    from stepscope.records.strategies import Strategy

_WRAP = Remedy(
    id="wrap-model",
    summary="call init_process_group and wrap the model (DistributedDataParallel, fully_shard), or "
    "let the trainer do it; start it once if one process was meant",
)
_JOIN = Remedy(
    id="start-as-job",
    summary="if they should train one model, start them with torchrun and wrap the model in "
    "DistributedDataParallel; if not, nothing is wrong",
)


def find(job: Job, _strategies: Sequence[Strategy]) -> Finding | None:
    """Only where every process is known to train and to exchange no gradients."""
    if not train_apart(job.members):
        return None
    members = [member for member in job.members if member is not None]
    if all(member.shared for member in members):
        return _sharing(members)
    return _launched(members) if max(m.world_size for m in members) > 1 else _alone(members)


def _launched(members: list[Membership]) -> Finding:
    """Started as one job: each rank repeats, or spoils, the others' work."""
    at_times = any(member.calls_before and not member.exchanged_bytes for member in members)
    unless = " unless models are averaged at other steps" if at_times else ""
    return _finding(
        members,
        severity="medium" if at_times else "high",
        summary=f"no gradients are exchanged between the {len(members)} ranks: each trains a model "
        f"of its own{unless}.",
        remedy=_WRAP,
    )


def _alone(members: list[Membership]) -> Finding:
    """Started one by one, as sweeps are: perhaps as it should be."""
    known = all(member.shared is False for member in members)
    each = (
        "they share no parameters, so each trains a model of its own"
        if known
        else "whether they share parameters cannot be told"
    )
    return _finding(
        members,
        severity="low",
        summary=f"{len(members)} processes train without a process group; {each}.",
        remedy=_JOIN,
    )


def _sharing(members: list[Membership]) -> Finding:
    return Finding(
        id="not-training-together",
        title="Shared memory",
        share=0.0,
        severity="none",
        of="work",
        summary=f"{len(members)} processes train one model in shared memory, without a process "
        "group: none waits for another.",
        evidence=_evidence(members),
    )


def _finding(
    members: list[Membership], *, severity: Severity, summary: str, remedy: Remedy
) -> Finding:
    return Finding(
        id="not-training-together",
        title="These ranks do not train together",
        share=1 - 1 / len(members),
        severity=severity,
        of="work",
        summary=summary,
        evidence=_evidence(members),
        remedies=(remedy,),
    )


def _evidence(members: list[Membership]) -> tuple[str, ...]:
    steps = ", ".join(str(member.steps) for member in members[:8])
    sent = max(member.exchanged_bytes or 0 for member in members)
    sizes = [member.trained_bytes for member in members if member.trained_bytes]
    trained = f"; {max(sizes):,} bytes are trained" if sizes else ""
    groups = max(member.groups for member in members)
    there = f"{groups} process group{'s' if groups > 1 else ''}" if groups else "no process group"
    pids = ", ".join(str(member.pid) for member in members[:8] if member.pid is not None)
    return (
        f"exchanged in a step: {sent:,} bytes{trained}",
        f"{there}; no DDP, FSDP, DTensor, pipeline stage or RPC",
        f"steps of each: {steps}" + (f" (process ids {pids})" if pids else ""),
    )
