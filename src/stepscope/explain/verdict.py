"""All ranks, one verdict: what the ranks say together, the findings in order, and what leads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.explain.budget import mean_budget, stretched
from stepscope.explain.findings import find_in_job, sort_findings
from stepscope.records.explanation import Explanation, called
from stepscope.trace.profiles import load_profiles

if TYPE_CHECKING:
    from stepscope.records.explanation import Budget, Finding, NcclSummary, RankExplanation
    from stepscope.records.job import Job
    from stepscope.records.profile import Profile
    from stepscope.records.quality import Note
    from stepscope.records.strategies import Strategy

_CAUSES = {
    "straggler": ("exposed-communication", "data-loading", "host-bound", "pipeline-bubble"),
    "gloo-on-device": ("host-bound", "launch-bound", "python-overhead", "blocking-syncs"),
}


def judge(
    ranks: tuple[RankExplanation, ...],
    notes: tuple[Note, ...],
    nccl: NcclSummary | None = None,
) -> Explanation:
    """The gravest finding is the verdict."""
    budget = mean_budget(ranks)
    job, strategies, together = _together(ranks, budget)
    findings = _merge(ranks, (*together, *(nccl.findings if nccl else ())))
    top = findings[0]
    whose = called(ranks, top.rank) if len(ranks) > 1 and top.rank is not None else ""
    first_remedy = top.remedies[0].summary if top.remedies else None
    return Explanation(
        verdict=f"{top.title}{f' ({whose})' if whose else ''}: {top.summary}",
        why=": ".join(filter(None, (whose, top.evidence[0]))) if top.evidence else "",
        next=first_remedy or "nothing to fix here: keep this trace to compare later runs with",
        ranks=ranks,
        budget=budget,
        findings=findings,
        job=job,
        strategies=strategies,
        nccl=nccl,
        quality=_once((*notes, *(job.notes if job else ()))),
    )


def _once(notes: tuple[Note, ...]) -> tuple[Note, ...]:
    """Files and ranks may say the same: the first to say it is enough; files left out add up."""
    first: dict[tuple[str, str], Note] = {}
    for note in notes:
        first.setdefault((note.id, note.detail if note.id == "left-out" else ""), note)
    return tuple(first.values())


def _together(
    ranks: tuple[RankExplanation, ...], budget: Budget
) -> tuple[Job | None, tuple[Strategy, ...], tuple[Finding, ...]]:
    """The job, how it is spread over its ranks, and what only several of them show."""
    alone = len(ranks) == 1
    if alone and not ranks[0].strategies:
        return None, (), ()
    from stepscope.explain.strategies.join import join_strategies

    spread = [(rank.rank or 0, rank.strategies) for rank in ranks]
    if alone:
        return None, _of_record(join_strategies(spread), ranks, budget.step_ms), ()
    from stepscope.explain.job import join_ranks
    from stepscope.explain.stragglers import costs_of_record

    parts = [replace(rank.part, rank=rank.rank or 0) for rank in ranks]
    job = costs_of_record(join_ranks(parts, _calibrations(ranks[0])), budget.step_ms)
    strategies = _of_record(join_strategies(spread, job.clock), ranks, budget.step_ms)
    return job, strategies, find_in_job(job, strategies)


def _of_record(
    strategies: tuple[Strategy, ...], ranks: tuple[RankExplanation, ...], step_ms: float
) -> tuple[Strategy, ...]:
    """Each strategy in the job's step, by the budgets and windows of the ranks that follow it."""
    from stepscope.explain.strategies.of_record import strategy_of_record

    found = []
    for strategy in strategies:
        members = tuple(rank for rank in ranks if (rank.rank or 0) in strategy.ranks) or ranks
        budget = stretched(mean_budget(members), step_ms)
        found.append(strategy_of_record(strategy, budget, [rank.part.pace for rank in members]))
    return tuple(found)


def _calibrations(first: RankExplanation) -> list[Profile]:
    """Of the host that the first rank ran on; a bare trace does not say where that was."""
    host = first.part.host
    found = load_profiles(host, skip_broken=True) if host else ()
    return [profile for profile in found if profile.kind == first.kind]


def _merge(
    ranks: tuple[RankExplanation, ...], of_job: tuple[Finding, ...] = ()
) -> tuple[Finding, ...]:
    """One finding of each kind: the gravest rank's, with that rank's number; then the job's."""
    worst: dict[str, Finding] = {finding.id: finding for finding in of_job}
    for rank in ranks:
        for finding in rank.findings:
            held = worst.get(finding.id)
            if held is None or finding.share > held.share:
                worst[finding.id] = _of_rank(finding, rank, several=len(ranks) > 1)
    return tuple(_cause_before_symptom(list(sort_findings(worst.values()))))


def _of_rank(finding: Finding, rank: RankExplanation, *, several: bool) -> Finding:
    """With the rank whose step its figures are of: among several, the budget's are their means."""
    named = finding.summary.replace("of the step", f"of {rank.called}'s step", 1)
    return replace(finding, rank=rank.rank, summary=named if several else finding.summary)


def _cause_before_symptom(found: list[Finding]) -> list[Finding]:
    """Ranks that wait in a collective show communication, and a rank that is short of data shows
    data loading: when one rank is behind it, that rank leads. Severity orders the rest: a straggler
    that explains little of a graver symptom stays behind it."""
    for cause, symptoms in _CAUSES.items():
        finding = next((each for each in found if each.id == cause), None)
        if finding is not None and found[0].id in symptoms and _explains(finding, found[0]):
            found = [finding, *(each for each in found if each is not finding)]
    return found


def _explains(cause: Finding, symptom: Finding) -> bool:
    return cause.severity == symptom.severity or cause.share >= symptom.share / 2
