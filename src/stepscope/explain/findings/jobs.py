"""Findings that only several ranks together show."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import LOW, JobEvidence, rule
from stepscope.explain.job.rank_part import train_apart
from stepscope.explain.strategies.join import bound
from stepscope.records.explanation import Finding, Remedy, Severity
from stepscope.records.job import Cause, Job, Membership, Straggler
from stepscope.records.normal import median
from stepscope.records.strategies import Pipeline
from stepscope.text.figures import factor, milliseconds, percent, size
from stepscope.text.words import counted, sentence

_REMEDIES: dict[Cause, tuple[Remedy, ...]] = {
    "compute": (
        remedies.CHECK_HOST.offer(),
        remedies.NO_STRAGGLER.offer("Bring this rank up to the pace of the others"),
        remedies.BALANCE.offer(
            "If this rank has more work than the others, give every rank the same amount"
        ),
    ),
    "input": (
        remedies.NO_DATA_WAIT.offer(
            "Feed this rank faster: cheaper batches, cached data, another num_workers"
        ),
        remedies.CHECK_STORAGE.offer("Check whether its host reads from slower storage"),
    ),
    "link": (
        remedies.BANDWIDTH.offer("Look for the slow link: cable, port, transport, routes"),
        remedies.CHECK_NCCL.offer(
            "Record with `stepscope run --nccl-debug` to see the transport between the ranks"
        ),
    ),
}
_WORDS: dict[Cause, str] = {
    "compute": "takes {times} times as long as the other ranks for its own work",
    "input": "waits for its data and takes {times} times as long as the other ranks",
    "link": "transfers take {times} times as long as they should, although ranks arrive together",
}
_HOST_REMEDIES: dict[Cause, tuple[Remedy, ...]] = {
    "compute": (
        remedies.CHECK_HOST.offer("Look at this host: other processes, clocks, power, its devices"),
        remedies.NO_STRAGGLER.offer("Bring this host up to the pace of the others, or replace it"),
    ),
    "input": (
        remedies.CHECK_STORAGE.offer("Check whether this host reads from slower storage"),
        remedies.NO_DATA_WAIT.offer(
            "Feed its ranks faster: cheaper batches, cached data, another num_workers"
        ),
    ),
    "link": _REMEDIES["link"],
}


_WANDERING = (
    remedies.CHECK_HOST.offer("Look for what delays one rank at a time: other processes, disks"),
    remedies.BALANCE.offer("If some batches take longer than others, balance them over the ranks"),
    remedies.BOUNDED_STALENESS.offer(),
)


@rule("Slow rank", scope="job")
def straggler(evidence: JobEvidence) -> Finding | None:
    """A rank, or a link, that all other ranks wait for; or a different rank each time. The
    costliest straggler leads; the others are evidence."""
    job = evidence.job
    stragglers = [*job.stragglers.ranks, job.stragglers.wandering]
    known = [straggler for straggler in stragglers if straggler is not None]
    if not known:
        return None
    worst, *others = known
    step_ms = _choose_step_ms(job, worst)
    if not step_ms:
        return None
    share = min(1.0, worst.cost_ms / step_ms)
    if worst.kind == "wandering":
        title = "Slow rank varies"
    else:
        title = {"rank": "", "host": "Slow host", "link": "Slow link"}[worst.scope]
    return straggler.finding(
        title=title,
        share=share,
        summary=f"{_begin(worst)}. This costs {milliseconds(worst.cost_ms)} of every step "
        f"({percent(share)}).",
        evidence=(
            *(worst.evidence[1:] if worst.link is not None else worst.evidence),
            *(_describe_other(straggler) for straggler in others[:3]),
            *_describe_arrivals(job, worst),
        ),
        remedies=_choose_remedies(worst),
        rank=worst.rank,
    )


def _choose_remedies(worst: Straggler) -> tuple[Remedy, ...]:
    if worst.kind == "wandering":
        return _WANDERING
    return (_HOST_REMEDIES if worst.scope == "host" else _REMEDIES)[worst.cause]


def _choose_step_ms(job: Job, worst: Straggler) -> float:
    """The step of record. Without one, the slowest rank's typical step for a slow rank, and the
    median over steps of the slowest rank for a slow link."""
    if job.step_ms:
        return job.step_ms
    if worst.cause != "link":
        return max(times.step_ms for times in job.times)
    steps = job.step_ns[(job.step_ns > 0).all(axis=1)]
    return median(steps.max(axis=1)) / 1e6 if len(steps) else 0.0


def _begin(worst: Straggler) -> str:
    """Capitalize the first word, unless it is the name of a host."""
    words = _describe_straggler(worst)
    return words if words.startswith(worst.host or " ") else sentence(words)


def _describe_straggler(straggler: Straggler) -> str:
    """How often it is late is known only where every step was seen."""
    if straggler.link is not None:
        return f"{straggler.evidence[0]}, although ranks arrive together"
    if straggler.scope == "host":
        its = f"{straggler.host} is slow: its {counted(len(straggler.ranks), 'rank')}"
        why = " because they wait for their data" if straggler.cause == "input" else ""
        if straggler.excess_ms is None:
            times = factor(straggler.slowdown)
            return (
                f"{its} take {times} times as long as those of other hosts for their own work{why}"
            )
        if straggler.kind == "constant":
            return f"{its} arrive {milliseconds(straggler.excess_ms)} after the others{why}"
        late = f"are late by {milliseconds(straggler.excess_ms)}"
        return f"{its} {late} in 1 step of {straggler.one_in}{why}"
    if straggler.excess_ms is None:
        times = factor(straggler.slowdown)
        return f"{_name(straggler)} {_WORDS[straggler.cause].format(times=times)}"
    late = f"is late by {milliseconds(straggler.excess_ms)}"
    often = f"in 1 step of {straggler.one_in}"
    if straggler.kind == "wandering":
        return f"a different rank each time {late} {often}, so no single rank is to blame"
    why = "it waits for its data" if straggler.cause == "input" else "its own work takes longer"
    often = "at every step" if straggler.kind == "constant" else often
    return f"{_name(straggler)} {late} {often} because {why}"


def _name(straggler: Straggler) -> str:
    if straggler.rank is not None:
        return f"rank {straggler.rank}"
    return f"group {straggler.group}:" if straggler.group else "the group's"


def _describe_other(straggler: Straggler) -> str:
    if straggler.excess_ms is not None or straggler.scope == "host" or straggler.link is not None:
        return _describe_straggler(straggler)
    times = factor(straggler.slowdown)
    return f"{_name(straggler)} is slow too ({straggler.cause}): {times} times as long"


def _describe_arrivals(job: Job, worst: Straggler) -> list[str]:
    """How often it arrived last, where clocks are precise enough to say."""
    if worst.rank is None:
        return []
    for row in job.arrivals:
        if row.rank == worst.rank and row.times_last:
            return [
                f"arrives last in {row.times_last} of {counted(row.of, 'collective')}, "
                f"typically {milliseconds(row.lead_ns / 1e6)} after the others"
            ]
    return []


@rule("Pipeline bubble", scope="job")
def pipeline_bubble(evidence: JobEvidence) -> Finding | None:
    """Pipeline stages that wait for each other. The pipeline that idles most."""
    pipelines = [strategy for strategy in evidence.strategies if isinstance(strategy, Pipeline)]
    worst = max(pipelines, key=lambda pipeline: pipeline.bubble_share, default=None)
    return _report(worst) if worst and worst.bubble_share >= LOW else None


def _report(pipeline: Pipeline) -> Finding:
    """The share: mean time of the stages without compute or another strategy's communication."""
    share = pipeline.bubble_share
    slowest = pipeline.deciding_stage
    return pipeline_bubble.finding(
        share=share,
        summary=f"Pipeline stages are idle for {percent(share)} of the step."
        f"{_least_possible(pipeline)}",
        evidence=(
            *(
                (
                    f"stage {', '.join(map(str, stage.stage_indices))}: computes "
                    f"{milliseconds(stage.compute_ns / 1e6)} of "
                    f"{milliseconds(stage.step_ns / 1e6)}, waits "
                    f"{milliseconds(stage.receive_wait_ns / 1e6)} for input"
                )
                for stage in pipeline.stages
            ),
            f"the slowest stage computes {factor(pipeline.imbalance)} times the mean",
        ),
        remedies=tuple(_offer_for_pipeline(pipeline)),
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


def _offer_for_pipeline(pipeline: Pipeline) -> Iterator[Remedy]:
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


_WRAP = remedies.WRAP_MODEL.offer()
_JOIN = remedies.START_AS_JOB.offer()


@rule("Ranks do not train together", scope="job")
def not_training_together(evidence: JobEvidence) -> Finding | None:
    """Ranks that are started as one job but do not exchange gradients. Only where every
    process is known to train and to exchange no gradients."""
    if not train_apart(evidence.job.members):
        return None
    members = [member for member in evidence.job.members if member is not None]
    words = _describe_members(members)
    if all(member.shared for member in members):
        return not_training_together.finding(
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
    return not_training_together.finding(
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


def _describe_members(members: list[Membership]) -> tuple[str, ...]:
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
