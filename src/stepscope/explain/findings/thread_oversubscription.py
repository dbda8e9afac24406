"""More threads want a core than there are cores: parallel operators wait for their last thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import LOW, RankEvidence, severity
from stepscope.explain.findings.rule import FindingRule
from stepscope.explain.machine_load import free_threads, looked, lost_to_others, threads_take_part
from stepscope.records import remedies

if TYPE_CHECKING:
    from stepscope.explain.cpu_use import CpuUse
    from stepscope.records.explanation import Finding, Remedy
    from stepscope.records.host_load import HostLoad, PlainSteps

MANY_SWITCHES = 50  # involuntary, a second; asked where the system does not tell waits
_MARGIN = 0.25  # cores: a machine is never quite idle


def find(evidence: RankEvidence) -> Finding | None:
    """Threads of the job and other processes together exceed the cores, and threads waited."""
    use = evidence.cpu
    load, plain = looked(use)
    if use is None or load is None or plain is None or load.room is None:
        return None
    wanted = load.job_threads + lost_to_others(plain)
    if load.job_threads < 2 or wanted <= load.room + _MARGIN:
        return None
    if load.threads == 1 and load.job_threads <= load.room:
        return None  # one thread a rank, and a core for each: the others are the cause
    share = _lost(evidence, use, plain)
    if share < LOW or not _waited(load, plain):
        return None
    fitting = free_threads(load)
    return RULE.finding(
        share=share,
        severity=severity(share),
        summary=f"{wanted:.1f} threads want {load.room:g} cores: {share:.0%} of the step is "
        "waiting for a core, or for another thread that has none.",
        evidence=tuple(_evidence(evidence, use, load, plain)),
        remedies=_remedies(load, fitting),
    )


def _lost(evidence: RankEvidence, use: CpuUse, plain: PlainSteps) -> float:
    """One loss, measured twice: by the system over plain steps, and by stalls in the trace."""
    stopped = (plain.throttled_ns or 0) / plain.wall_ns
    stalled = use.stalled_share * evidence.budget_share("compute")
    return min(1.0, max(plain.waiting_share or 0.0, stopped, stalled))


def _waited(load: HostLoad, plain: PlainSteps) -> bool:
    """The system saw more than one thread of the job wait: stalls alone have other causes."""
    if (plain.throttled_ns or 0) >= LOW * plain.wall_ns:
        return True
    if plain.waiting_ns is None or plain.training_waiting_ns is None:
        seconds = plain.wall_ns / 1e9
        return (plain.involuntary or 0) >= MANY_SWITCHES * seconds
    if plain.training_waiting_ns < LOW * plain.wall_ns:
        return False
    return (load.local_ranks or 1) > 1 or threads_take_part(load, plain)


def _evidence(evidence: RankEvidence, use: CpuUse, load: HostLoad, plain: PlainSteps) -> list[str]:
    ranks = load.local_ranks or 1
    each = "1 thread" if load.threads == 1 else f"{load.threads} threads"
    if ranks > 1:
        each = f"{ranks} ranks with {each} each"
    others = lost_to_others(plain)
    lines = [
        f"{each} on {load.room:g} cores"
        + (f", where other processes keep {others:.1f} cores busy" if others >= _MARGIN else "")
    ]
    if plain.waiting_share is not None:
        lines.append(
            f"the training thread was ready but had no core for "
            f"{evidence.step_ms(plain.waiting_share)} ({plain.steps} steps without the profiler)"
        )
    if plain.involuntary:
        lines.append(
            f"threads lost their core {plain.involuntary / plain.steps:,.0f} times a step "
            "(involuntary context switches)"
        )
    if plain.throttled_ns:
        lines.append(
            f"the control group's quota of {load.quota_cores or load.room:g} cores stopped it for "
            f"{evidence.step_ms(min(1.0, plain.throttled_ns / plain.wall_ns))}"
        )
    if use.stalled_share >= LOW:
        lines.append(
            f"{use.stalled_share:.0%} of the operators' time is calls that take more than twice as "
            "long as others of the same operator and shapes"
        )
    return lines


def _remedies(load: HostLoad, fitting: int) -> tuple[Remedy, ...]:
    pinned = remedies.PIN_RANKS.offer(
        "give the job cores of its own: taskset -c (one range for each rank)",
    )
    if load.threads == 1:
        return (
            remedies.FEWER_RANKS.offer("start no more ranks than there are cores"),
            pinned,
        )
    number = fitting if fitting < load.threads else max(1, load.threads // 2)
    return (
        remedies.THREADS.offer(
            f"OMP_NUM_THREADS={number} (or torch.set_num_threads({number})): a thread for "
            "each core that is free",
        ),
        pinned,
    )


RULE = FindingRule(
    id="thread-oversubscription", scope="rank", title="More threads than cores", find=find
)
