"""More threads than cores: parallel operators wait for their last thread."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.explain.cpu_use import (
    CpuUse,
    free_threads,
    looked,
    lost_to_others,
    threads_take_part,
)
from stepscope.explain.findings.evidence import LOW, RankEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records import remedies
from stepscope.records.explanation import Remedy
from stepscope.records.rank_facts import HostLoad, PlainSteps
from stepscope.text.figures import percent, significant
from stepscope.text.words import counted

MANY_SWITCHES = 50  # involuntary, per second; used when the system does not report waits
_MARGIN = 0.25  # cores: a machine is never completely idle


def find(evidence: RankEvidence) -> Finding | None:
    """The job has more threads than cores, and threads waited. Where its threads fit, others are
    the cause (other_processes.py)."""
    use = evidence.cpu
    load, plain = looked(use)
    if use is None or load is None or plain is None or load.room is None:
        return None
    if load.job_threads <= load.room + _MARGIN:
        return None
    # The larger of two measures: waits that the system counts, and stalls in the trace.
    stopped = (plain.throttled_ns or 0) / plain.wall_ns
    stalled = use.stalled_share * evidence.budget_share("compute")
    share = min(1.0, max(plain.waiting_share or 0.0, stopped, stalled))
    if share < LOW or not _have_waited(load, plain):
        return None
    fitting = free_threads(load)
    return RULE.finding(
        share=share,
        summary=f"{load.job_threads} threads of this job share {load.room:g} cores. For "
        f"{percent(share)} of the step, threads wait for a core or for each other.",
        evidence=tuple(_list_evidence(evidence, use, load, plain)),
        remedies=_offer(load, fitting),
    )


def _have_waited(load: HostLoad, plain: PlainSteps) -> bool:
    """Whether the system counted waits of the job's threads: stalls alone have other causes."""
    if (plain.throttled_ns or 0) >= LOW * plain.wall_ns:
        return True
    if plain.waiting_ns is None or plain.training_waiting_ns is None:
        seconds = plain.wall_ns / 1e9
        return (plain.involuntary or 0) >= MANY_SWITCHES * seconds
    if plain.training_waiting_ns < LOW * plain.wall_ns:
        return False
    return (load.local_ranks or 1) > 1 or threads_take_part(load, plain)


def _list_evidence(
    evidence: RankEvidence, use: CpuUse, load: HostLoad, plain: PlainSteps
) -> Iterator[str]:
    ranks = load.local_ranks or 1
    threads = counted(load.threads, "thread")
    if ranks > 1:
        threads = f"{ranks} ranks with {threads} each"
    others = lost_to_others(plain)
    busy = f"; other processes keep {significant(others)} busy" if others >= _MARGIN else ""
    yield f"{threads} on {load.room:g} cores{busy}"
    if plain.waiting_share is not None:
        yield (
            f"the training thread was ready but had no core for "
            f"{evidence.step_ms(plain.waiting_share)} ({plain.steps} steps without the profiler)"
        )
    if plain.involuntary:
        yield (
            f"threads lost their core {plain.involuntary / plain.steps:,.0f} times per step "
            "(involuntary context switches)"
        )
    if plain.throttled_ns:
        yield (
            f"the container's quota of {load.quota_cores or load.room:g} cores stopped the job for "
            f"{evidence.step_ms(min(1.0, plain.throttled_ns / plain.wall_ns))}"
        )
    if use.stalled_share >= LOW:
        yield (
            f"{percent(use.stalled_share)} of the operators' time is stalls: calls that take more "
            "than twice as long as others of the same operator and shapes"
        )


def _offer(load: HostLoad, fitting: int) -> tuple[Remedy, ...]:
    pinned = (remedies.PIN_RANKS.offer(),) if (load.local_ranks or 1) > 1 else ()
    if load.threads == 1:
        return (remedies.FEWER_RANKS.offer(), *pinned)
    number = fitting if fitting < load.threads else max(1, load.threads // 2)
    return (
        remedies.THREADS.offer(
            f"Set OMP_NUM_THREADS={number}, or call torch.set_num_threads({number}): one thread "
            "for each free core"
        ),
        *pinned,
    )


RULE = FindingRule(id="thread-oversubscription", title="More threads than cores", find=find)
