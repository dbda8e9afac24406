"""Pipeline stages that wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.explain.findings.evidence import LOW, JobEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.strategies.join import bound
from stepscope.records import remedies
from stepscope.records.explanation import Remedy
from stepscope.records.strategies import Pipeline
from stepscope.text.figures import factor, milliseconds, percent
from stepscope.text.words import counted


def find(evidence: JobEvidence) -> Finding | None:
    """The pipeline that idles most."""
    pipelines = [strategy for strategy in evidence.strategies if isinstance(strategy, Pipeline)]
    worst = max(pipelines, key=lambda pipeline: pipeline.bubble_share, default=None)
    return _report(worst) if worst and worst.bubble_share >= LOW else None


def _report(pipeline: Pipeline) -> Finding:
    """The share: mean time of the stages without compute or another strategy's communication."""
    share = pipeline.bubble_share
    slowest = pipeline.deciding_stage
    return RULE.finding(
        share=share,
        summary=f"Pipeline stages are idle for {percent(share)} of the step."
        f"{_least_possible(pipeline)}",
        evidence=(
            *(
                (
                    f"stage {', '.join(map(str, stage.stage_indices))}: computes "
                    f"{milliseconds(stage.compute_ns / 1e6)} of "
                    f"{milliseconds(stage.step_ns / 1e6)}, waits {milliseconds(stage.receive_wait_ns / 1e6)} for input"
                )
                for stage in pipeline.stages
            ),
            f"the slowest stage computes {factor(pipeline.imbalance)} times the mean",
        ),
        remedies=tuple(_offer(pipeline)),
        rank=None if slowest is None else pipeline.stages[slowest].ranks[0],
    )


def _least_possible(pipeline: Pipeline) -> str:
    if pipeline.bound_share is None:
        return ""
    microbatches = counted(pipeline.microbatches or 0, "micro-batch", "micro-batches")
    return (
        f" With {counted(pipeline.size, 'stage')} and {microbatches}, "
        f"{percent(pipeline.bound_share)} is the least possible."
    )


def _offer(pipeline: Pipeline) -> Iterator[Remedy]:
    slowest = pipeline.deciding_stage
    if slowest is not None:
        where = ", ".join(map(str, pipeline.stages[slowest].stage_indices))
        yield remedies.BALANCE_STAGES.offer(
            f"Move layers away from stage {where}: it computes {factor(pipeline.imbalance)} "
            "times as long as the mean, and the others wait for it"
        )
    if pipeline.microbatches and pipeline.bound_share is not None:
        most = max(len(stage.stage_indices) for stage in pipeline.stages)
        twice = bound(pipeline.size, 2 * pipeline.microbatches * most)
        yield remedies.MICRO_BATCHES.offer(
            f"Use {2 * pipeline.microbatches} micro-batches: the least possible idle time "
            f"falls from {percent(pipeline.bound_share)} to {percent(twice)}"
        )
    if pipeline.schedule != "interleaved":
        yield remedies.INTERLEAVE.offer()


RULE = FindingRule(id="pipeline-bubble", scope="job", title="Pipeline bubble", find=find)
