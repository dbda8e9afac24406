"""Findings about a step that computes on the CPU: threads, cores, other processes, dispatch."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope import changes as remedies
from stepscope.explain.cpu_use import (
    LONG_NS,
    CpuUse,
    disturbed,
    free_threads,
    idle_cores,
    is_beside_others,
    looked,
    lost_to_others,
    speedup,
    threads_take_part,
)
from stepscope.explain.findings.evidence import LOW, RankEvidence, rule, severity_of
from stepscope.records.explanation import Finding, Remedy
from stepscope.records.hardware import Spot
from stepscope.records.rank_facts import HostLoad, PlainSteps
from stepscope.text.figures import duration, milliseconds, percent, significant
from stepscope.text.words import counted

MANY_SWITCHES = 50  # involuntary, per second; used when the system does not report waits
_MARGIN = 0.25  # cores: a machine is never completely idle


@rule("More threads than cores")
def thread_oversubscription(evidence: RankEvidence) -> Finding | None:
    """More threads than cores: parallel operators wait for their last thread. The job has
    more threads than cores, and threads waited. Where its threads fit, others are the cause
    (other-processes)."""
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
    return thread_oversubscription.finding(
        share=share,
        summary=f"{load.job_threads} threads of this job share {load.room:g} cores. For "
        f"{percent(share)} of the step, threads wait for a core or for each other.",
        evidence=tuple(_describe_threads(evidence, use, load, plain)),
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


def _describe_threads(
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


_LEAST_CORES = 0.2


@rule("Other processes use the cores")
def other_processes(evidence: RankEvidence) -> Finding | None:
    """Programs outside the job take cores that the step needs. Other processes take a tenth
    of the cores, or some while the training thread waits for one. A tenth makes every other
    time doubtful: then this finding leads."""
    load, plain = looked(evidence.cpu)
    if load is None or plain is None:
        return None
    others, share = lost_to_others(plain), plain.waiting_share or 0.0
    leads = is_beside_others(evidence.cpu)
    if not leads and (others < _LEAST_CORES or share < LOW):
        return None
    cores = load.cores or load.room
    busy = f"{significant(others)} of {f'{cores:g}' if cores else 'the'} cores busy"
    waits = (
        f"The training thread waits for a core for {percent(share)} of the step because other "
        f"processes keep {busy}."
    )
    beside = f"Other processes keep {busy} during the steps, so every measured time is too long."
    return other_processes.finding(
        share=share,
        severity="high" if leads else None,
        summary=waits if share >= LOW else beside,
        evidence=tuple(_describe_others(evidence, plain)),
        remedies=(
            remedies.IDLE_MACHINE.offer(),
            remedies.THREADS.offer(
                "Set OMP_NUM_THREADS to fewer threads: each of them gets a core sooner"
            ),
        )[: 2 if threads_take_part(load, plain) else 1],
    )


def _describe_others(evidence: RankEvidence, plain: PlainSteps) -> Iterator[str]:
    if plain.waiting_share is not None:
        yield (
            f"ready to run but without a core: {evidence.step_ms(plain.waiting_share)} "
            f"({counted(plain.steps, 'step')} without the profiler)"
        )
    if plain.others:
        named = ", ".join(f"{other.name} {significant(other.cores)}" for other in plain.others)
        yield f"cores used by programs that still ran at the end: {named}"
    if plain.stolen_cores >= _LEAST_CORES:
        yield f"other virtual machines took {significant(plain.stolen_cores)} cores (steal time)"


_LEAST_IDLE = 0.75  # cores


@rule("Idle cores")
def too_few_threads(evidence: RankEvidence) -> Finding | None:
    """Large operators run on few threads while cores are idle. Operators are long enough to
    share, and cores are measured to be idle."""
    use = evidence.cpu
    load, plain = looked(use)
    if use is None or load is None or plain is None:
        return None
    idle = idle_cores(load, plain)
    fitting = free_threads(load)
    if idle is None or idle < _LEAST_IDLE or fitting <= load.threads:
        return None
    shared = use.long_share * evidence.budget_share("compute")
    share = shared * (1 - 1 / speedup(load.threads, fitting))
    if share < LOW:
        return None
    return too_few_threads.finding(
        share=share,
        summary=f"{significant(idle)} of {load.room or 0:g} cores are idle while {_threads(load)} "
        f"compute{'s' if load.threads == 1 else ''}. Operators that {fitting} threads can share "
        f"take {percent(shared)} of the step.",
        evidence=(
            f"operators of {LONG_NS / 1e6:g} ms and more, which threads can share: "
            f"{evidence.step_ms(shared)}",
            f"the process keeps {significant(plain.used_cores or 0.0)} cores busy "
            f"({counted(plain.steps, 'step')} without the profiler)",
            *(f"{name}={value} is set" for name, value in load.variables.items() if "NUM" in name),
        ),
        remedies=(
            remedies.THREADS.offer(
                f"Set OMP_NUM_THREADS={fitting}, or call torch.set_num_threads({fitting}): one "
                "thread for each core"
            ),
        ),
    )


def _threads(load: HostLoad) -> str:
    ranks = load.local_ranks or 1
    threads = counted(load.threads, "thread")
    return f"{threads} of each rank" if ranks > 1 else threads


_SPINNING = 1.4  # cores kept busy by operators that threads cannot share
_SHORT = 0.25  # of the time in long operators: with more, threads have work to share


@rule("Operators too small")
def dispatch_bound(evidence: RankEvidence) -> Finding | None:
    """A CPU step of operators so short that calling them costs more than their work. The
    time of operators beyond their arithmetic and bytes, in their fast calls."""
    use = evidence.cpu
    if use is None:
        return None
    share = use.overhead_share * evidence.budget_share("compute")
    if share < LOW:
        return None
    spinning = _describe_spinning(use)
    return dispatch_bound.finding(
        share=share,
        summary=f"{percent(share)} of the step goes into calling {use.events:,.0f} operators, not "
        "into their arithmetic.",
        evidence=(
            f"overhead: {evidence.step_ms(share)}, {duration(use.overhead_ns / use.events)} per "
            "operator",
            *([spinning] if spinning else []),
            *_describe_unknown(use),
        ),
        remedies=(
            remedies.BATCH.offer("Use a larger batch: each operator does more work per call"),
            remedies.FUSED_OPTIMIZER.offer(
                "Pass fused=True to the optimizer: one operator updates all parameters"
            ),
            *([remedies.ONE_THREAD.offer()] if spinning else []),
        ),
    )


def _describe_spinning(use: CpuUse) -> str:
    """Threads that wait for the next short operator keep their cores busy doing nothing."""
    load, plain = looked(use)
    if load is None or plain is None or load.threads < 2 or use.long_share >= _SHORT:
        return ""
    if (plain.used_cores or 0.0) < _SPINNING:
        return ""
    return (
        f"the process keeps {significant(plain.used_cores or 0.0)} cores busy although its "
        f"operators are too short to share: its {load.threads} threads spin between them"
    )


def _describe_unknown(use: CpuUse) -> list[str]:
    if use.priced_share >= 0.5:
        return []
    return [
        f"the work of {percent(1 - use.priced_share)} of the operators' time is not known: there, "
        "only calls under 5 µs count as overhead"
    ]


LEAST_SHARE = 0.01  # of the sampled values
SLOW = 4.0  # times the time at the roof
LEAST_NS = 50_000  # per call: shorter calls are slow because they are short


@rule("Denormal numbers")
def denormals(evidence: RankEvidence) -> Finding | None:
    """Denormal numbers: values so small that CPUs compute with them many times slower.
    Denormal values exist, are not flushed to zero, and operators run far below their roof."""
    load = evidence.cpu.load if evidence.cpu else None
    if evidence.cpu is None or load is None or load.flush_denormal is not False:
        return None
    seen = load.denormal_share or 0.0
    slow = [] if disturbed(evidence.cpu) else _list_slow(evidence)
    share = evidence.mean_step_share(sum(spot.gap_ns or 0.0 for spot in slow))
    if seen < LEAST_SHARE or share < LOW:
        return None
    return denormals.finding(
        share=share,
        severity="medium" if severity_of(share) == "high" else severity_of(share),
        summary=f"Unusually slow operators lose {percent(share)} of the step. {percent(seen)} of "
        "the sampled parameters, gradients and optimizer state are denormal (extremely small) "
        "numbers.",
        evidence=(
            "denormal numbers are not flushed to zero (torch.set_flush_denormal is off)",
            *(
                f"{spot.operator}: {milliseconds(spot.device_ns / 1e6)} per step"
                for spot in slow[:3]
            ),
            "how much of this is due to denormals is not known: time the step with them flushed",
        ),
        remedies=(remedies.FLUSH_DENORMAL.offer(),),
    )


def _list_slow(evidence: RankEvidence) -> list[Spot]:
    spots = evidence.efficiency.spots if evidence.efficiency else ()
    slow = [
        spot
        for spot in spots
        if spot.roof_ns
        and spot.device_ns > SLOW * spot.roof_ns
        and spot.device_ns > LEAST_NS * spot.calls
    ]
    return sorted(slow, key=lambda spot: -(spot.gap_ns or 0.0))
