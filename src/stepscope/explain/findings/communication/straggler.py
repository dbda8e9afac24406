"""A rank, or a link, that all other ranks wait for; or a different rank each time."""

from __future__ import annotations

import numpy as np

from stepscope.explain.findings.evidence import JobEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records import remedies
from stepscope.records.explanation import Remedy
from stepscope.records.job import Cause, Job, Straggler
from stepscope.text.figures import factor, milliseconds, percent
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


def find(evidence: JobEvidence) -> Finding | None:
    """The costliest straggler leads; the others are evidence."""
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
    return RULE.finding(
        title=_title(worst),
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
    return float(np.median(steps.max(axis=1))) / 1e6 if len(steps) else 0.0


def _title(worst: Straggler) -> str:
    if worst.kind == "wandering":
        return "Slow rank varies"
    return {"rank": "", "host": "Slow host", "link": "Slow link"}[worst.scope]


def _begin(worst: Straggler) -> str:
    """Capitalize the first word, unless it is the name of a host."""
    words = _describe(worst)
    return words if words.startswith(worst.host or " ") else sentence(words)


def _describe(straggler: Straggler) -> str:
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
        return _describe(straggler)
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


RULE = FindingRule(id="straggler", scope="job", title="Slow rank", find=find)
