"""Stages of a pipeline that wait for each other. A finding about the job, not about a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import LOW, severity
from stepscope.explain.strategies.join import bound
from stepscope.records.explanation import Finding, Remedy
from stepscope.records.strategies import Pipeline
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.job import Job
    from stepscope.records.strategies import Strategy


def find(_job: Job, strategies: Sequence[Strategy]) -> Finding | None:
    """Of the pipeline that idles most."""
    found = [judge(each) for each in strategies if isinstance(each, Pipeline)]
    return max((each for each in found if each), key=lambda each: each.share, default=None)


def judge(pipeline: Pipeline) -> Finding | None:
    """The mean over the stages of the time that is neither compute nor another strategy's."""
    share = pipeline.bubble_share
    if share < LOW:
        return None
    deciding = pipeline.deciding_stage
    return Finding(
        id="pipeline-bubble",
        title="Pipeline bubble",
        share=share,
        severity=severity(share),
        summary=f"the stages of the pipeline idle {share:.0%} of the step{_at_least(pipeline)}.",
        evidence=(
            *(
                f"stage {', '.join(map(str, stage.stage_indices))}: computes "
                f"{stage.compute_ns / 1e6:.2f} ms of {stage.step_ns / 1e6:.2f} ms, "
                f"waits for input {stage.receive_wait_ns / 1e6:.2f} ms"
                for stage in pipeline.stages
            ),
            f"the longest stage computes {pipeline.imbalance:.2f} of the mean",
        ),
        remedies=_remedies(pipeline),
        rank=None if deciding is None else pipeline.stages[deciding].ranks[0],
    )


def _at_least(pipeline: Pipeline) -> str:
    if pipeline.bound_share is None:
        return ""
    return (
        f"; {counted(pipeline.size, 'stage')} and "
        f"{counted(pipeline.microbatches or 0, 'micro-batch', 'micro-batches')} cost at least "
        f"{pipeline.bound_share:.0%}"
    )


def _remedies(pipeline: Pipeline) -> tuple[Remedy, ...]:
    out = []
    deciding = pipeline.deciding_stage
    if deciding is not None:
        where = ", ".join(map(str, pipeline.stages[deciding].stage_indices))
        out.append(
            Remedy(
                id="balance-stages",
                summary=f"move layers away from stage {where}: it computes "
                f"{pipeline.imbalance:.2f} of the mean and the others wait for it",
            )
        )
    if pipeline.microbatches and pipeline.bound_share is not None:
        most = max(len(stage.stage_indices) for stage in pipeline.stages)
        twice = bound(pipeline.size, 2 * pipeline.microbatches * most)
        out.append(
            Remedy(
                id="micro-batches",
                summary=f"{2 * pipeline.microbatches} micro-batches lower what the schedule costs "
                f"at the least from {pipeline.bound_share:.0%} to {twice:.0%}",
            )
        )
    if pipeline.schedule != "interleaved":
        out.append(
            Remedy(
                id="interleave",
                summary="several stages a rank (Interleaved1F1B) divide filling and draining by "
                "their number",
            )
        )
    return tuple(out)
