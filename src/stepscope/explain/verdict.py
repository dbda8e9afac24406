"""One verdict over all ranks: the findings of the ranks and of the job, the most severe first."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from stepscope.changes import BATCH, OWN_PYTHON
from stepscope.explain.findings import NO_LOSS, apply_rules, sort_findings
from stepscope.explain.findings.evidence import JobEvidence
from stepscope.explain.findings.host import ON_CPU
from stepscope.explain.incomplete_ranks import tell_span
from stepscope.records.explanation import (
    SEVERITIES,
    Budget,
    Explanation,
    Finding,
    Headline,
    NcclSummary,
    RankExplanation,
    Remedy,
    called,
)
from stepscope.records.hardware import Profile
from stepscope.records.job import Job
from stepscope.records.parameter_server import TogetherSummary
from stepscope.records.quality import Note
from stepscope.records.rank import RanksWithoutTrace, RankWithoutTrace
from stepscope.records.run import RankRun, WholeRun
from stepscope.records.strategies import Strategy
from stepscope.step.timeline import mean_budget, stretched
from stepscope.text.words import sentence

_OF_SMALL_BATCHES = ("small-batch", "dispatch-bound")
# A cause, and the findings that may be its symptoms.
_CAUSES = {
    "straggler": ("exposed-communication", "data-loading", "host-bound", "pipeline-bubble"),
    "gloo-on-device": ("host-bound", "launch-bound", "python-overhead", "blocking-syncs"),
    "exchange-every-pass": ("exposed-communication",),
    "data-stalls": ("data-loading", "host-bound"),
    "gc-pauses": ("python-overhead", "host-bound"),
    "recompiles": ("python-overhead", "host-bound"),
    "memory-growth": ("slows-down",),
}


def judge(
    ranks: tuple[RankExplanation, ...],
    notes: tuple[Note, ...],
    nccl: NcclSummary | None = None,
    calibrations: tuple[Profile, ...] = (),
    other_runs: Sequence[RankRun] = (),
    untraced: Sequence[RankWithoutTrace] = (),
    together: TogetherSummary | None = None,
) -> Explanation:
    """The most severe finding is the verdict. `calibrations` are those of the first rank's host;
    `other_runs` are earlier attempts, and processes outside the job; `untraced` are ranks of it."""
    budget = mean_budget(ranks)
    job, strategies, job_findings = _join_ranks(ranks, budget, calibrations, untraced)
    if job is not None and job.run_arrivals is not None:
        from stepscope.explain.collective_waits import explain_waits, without_window_waits
        from stepscope.explain.job.late_ranks import waits_by_step

        waits, error_ns = waits_by_step(job.run_arrivals), job.run_arrivals.error_ns
        ranks = explain_waits(ranks, waits, error_ns)
        ranks = without_window_waits(ranks, waits, error_ns)
        budget = mean_budget(ranks)
    of_server = apply_rules("together", together) if together else ()
    findings = _merge(ranks, (*job_findings, *(nccl.findings if nccl else ()), *of_server))
    top = findings[0]
    whose = called(ranks, top.rank) if len(ranks) > 1 and top.rank is not None else ""
    remedy = next(iter(leading_remedies(top)), None)
    explanation = Explanation(
        verdict=state(top, whose),
        why=sentence(": ".join(filter(None, (whose, top.evidence[0])))) if top.evidence else "",
        next=remedy.summary if remedy else without_remedy(top),
        headline=Headline(finding=top.id, remedy=remedy.id if remedy else None),
        ranks=ranks,
        budget=budget,
        findings=findings,
        job=job,
        strategies=strategies,
        nccl=nccl,
        together=together,
        quality=_drop_repeated(
            (*notes, *(job.notes if job else ()), *(together.notes if together else ()))
        ),
        run=_join_runs(ranks, other_runs, untraced, job),
        without_trace=_describe_untraced(untraced, len(ranks)),
    )
    return tell_span(explanation)


def state(finding: Finding, whose: str) -> str:
    """The title and the summary; a summary that says all words of the title stands alone."""
    said = f" {finding.summary.lower()}"
    if all(f" {word}" in said for word in f"{finding.title} {whose}".lower().split()):
        return finding.summary
    return f"{finding.title}{f' ({whose})' if whose else ''}: {finding.summary}"


def leading_remedies(finding: Finding) -> tuple[Remedy, ...]:
    """Those that treat the finding's cause. A larger batch makes every fixed cost smaller, whatever
    causes it: it treats only steps that have too little to do. On a CPU that is what Python between
    operators means, unless its line is known."""
    ids = {remedy.id for remedy in finding.remedies}
    small = finding.id in _OF_SMALL_BATCHES or finding.title == ON_CPU
    if small and OWN_PYTHON.id not in ids:
        return finding.remedies
    return tuple(remedy for remedy in finding.remedies if remedy.id != BATCH.id)


def without_remedy(finding: Finding) -> str:
    """What to do where no known remedy treats the finding."""
    if finding.id in NO_LOSS:
        return "Nothing to fix. Keep this trace and compare later runs with it: stepscope compare"
    if finding.where:
        place = finding.where[0]
        return f"Look at {place.file}:{place.line} {place.function}".rstrip()
    return "Look at the evidence below: no known change treats this"


def _describe_untraced(
    untraced: Sequence[RankWithoutTrace], traced: int
) -> RanksWithoutTrace | None:
    if not untraced:
        return None
    from stepscope.explain.incomplete_ranks import describe_untraced

    return describe_untraced(untraced, traced)


def _join_runs(
    ranks: tuple[RankExplanation, ...],
    others: Sequence[RankRun],
    untraced: Sequence[RankWithoutTrace],
    job: Job | None,
) -> WholeRun | None:
    """None for bare traces."""
    runs = [replace(rank.run, rank=rank.rank or 0) for rank in ranks if rank.run]
    if not runs:
        return None
    from stepscope.explain.whole_run.account import join_all_ranks

    return join_all_ranks(runs, untraced, others, job)


def _drop_repeated(notes: tuple[Note, ...]) -> tuple[Note, ...]:
    """One note of each kind; every file that was left out keeps its own."""
    first: dict[tuple[str, str], Note] = {}
    for note in notes:
        first.setdefault((note.id, note.detail if note.id == "left-out" else ""), note)
    return tuple(first.values())


def _join_ranks(
    ranks: tuple[RankExplanation, ...],
    budget: Budget,
    calibrations: tuple[Profile, ...],
    untraced: Sequence[RankWithoutTrace],
) -> tuple[Job | None, tuple[Strategy, ...], tuple[Finding, ...]]:
    """The job, its strategies, and the findings that only several ranks show."""
    alone = len(ranks) == 1 and not untraced
    if alone and not ranks[0].strategies:
        return None, (), ()
    from stepscope.explain.strategies.join import join_strategies

    spread = [(rank.rank or 0, rank.strategies) for rank in ranks]
    if alone:
        return None, _scale_strategies(join_strategies(spread), ranks, budget.step_ms), ()
    from stepscope.explain.job.all_ranks import join_ranks
    from stepscope.explain.job.stragglers import costs_of_record

    parts = [replace(rank.part, rank=rank.rank or 0) for rank in ranks]
    others = [rank.part for rank in untraced]
    job = costs_of_record(join_ranks(parts, calibrations, others), budget.step_ms)
    strategies = _scale_strategies(join_strategies(spread, job.clock), ranks, budget.step_ms)
    return job, strategies, tuple(apply_rules("job", JobEvidence(job, strategies)))


def _scale_strategies(
    strategies: tuple[Strategy, ...], ranks: tuple[RankExplanation, ...], step_ms: float
) -> tuple[Strategy, ...]:
    """Each strategy's times, scaled to the step of record by the ranks that use it."""
    from stepscope.explain.strategies.join import strategy_of_record

    scaled = []
    for strategy in strategies:
        members = tuple(rank for rank in ranks if (rank.rank or 0) in strategy.ranks) or ranks
        budget = stretched(mean_budget(members), step_ms)
        scaled.append(strategy_of_record(strategy, budget, [rank.part.pace for rank in members]))
    return tuple(scaled)


def _merge(
    ranks: tuple[RankExplanation, ...], job_findings: tuple[Finding, ...] = ()
) -> tuple[Finding, ...]:
    """One finding of each kind: that of the rank where its share is largest, and the job's."""
    worst: dict[str, Finding] = {finding.id: finding for finding in job_findings}
    for rank in ranks:
        for finding in rank.findings:
            known = worst.get(finding.id)
            if known is None or finding.share > known.share:
                # Name the rank whose step the figures refer to; among several,
                # the budget is their mean.
                summary = finding.summary
                if len(ranks) > 1:
                    summary = summary.replace("of the step", f"of {rank.called}'s step", 1)
                worst[finding.id] = replace(finding, rank=rank.rank, summary=summary)
    return tuple(put_cause_first(list(sort_findings(worst.values()))))


def put_cause_first(findings: list[Finding]) -> list[Finding]:
    """A slow rank makes the others wait in collectives: then the straggler leads, not the waiting.
    A cause that explains little of a more severe symptom stays where it is. One that leads is as
    severe as what it causes."""
    for cause, symptoms in _CAUSES.items():
        first = next((finding for finding in findings if finding.id == cause), None)
        if first is not None and findings[0].id in symptoms and _explains(first, findings[0]):
            others = [finding for finding in findings if finding is not first]
            most = min((finding.severity for finding in findings), key=SEVERITIES.index)
            findings = [replace(first, severity=most), *others]
    return findings


def _explains(cause: Finding, symptom: Finding) -> bool:
    return cause.severity == symptom.severity or cause.share >= symptom.share / 2
