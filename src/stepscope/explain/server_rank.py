"""A run of which only the parameter server's events were kept, in the place of a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.errors import NotCapturedError
from stepscope.explain.findings import healthy
from stepscope.explain.together.summary import summarise_together
from stepscope.explain.untimed_rank import SERVER_ONLY, untimed_rank
from stepscope.records import remedies
from stepscope.records.figures import significant
from stepscope.records.quality import Note
from stepscope.records.words import counted
from stepscope.trace.together_files import read_together

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.explanation import Finding, RankExplanation
    from stepscope.records.together_summary import TogetherSummary, TogetherVerdict

_PAYS: dict[TogetherVerdict, str] = {
    "pays": "pays",
    "does not pay": "does not pay",
    "barrier": "consistency",
    "one worker": "consistency",
}


def explain_server(path: Path, name: str) -> RankExplanation:
    """`path` is the server's description in a run folder, `name` what the user calls it. Raises
    NotCapturedError if no worker finished a step."""
    run = path.parent.parent
    summary = explain_together_folder(run)
    if summary is None:
        raise NotCapturedError(f"{run}: no worker finished a step with the parameter server")
    return untimed_rank(
        path=name,
        kind="cpu",
        events=sum(shard.updates + shard.pulls for shard in summary.shards) + summary.updates,
        findings=(_describe_run(summary),),
        quality=(Note(id=SERVER_ONLY, detail="no trace: only the parameter server was recorded"),),
    )


def explain_together_folder(*runs: Path) -> TogetherSummary | None:
    """The run folders of one job; None without a parameter server or a finished step."""
    events = read_together(runs)
    return summarise_together(events) if events is not None else None


def _describe_run(summary: TogetherSummary) -> Finding:
    workers, shards = len(summary.workers), len(summary.shards)
    who = f"{counted(workers, 'worker')} and {counted(shards, 'shard')}"
    return healthy.RULE.finding(
        title="Parameter server",
        share=0.0,
        of="run",
        severity="none",
        summary=f"{summary.consistency} {_PAYS[summary.verdict]}: {who} apply "
        f"{significant(summary.updates_per_s)} updates per second.",
        evidence=(summary.why,),
        remedies=(
            remedies.STEPSCOPE_RUN.offer(
                "Start the training with `stepscope run` to see where the workers' own time goes"
            ),
        ),
    )
