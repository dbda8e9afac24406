"""Findings about the host: it launches too slowly, Python runs between operators, calls block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepscope import changes as remedies
from stepscope.explain.cpu_use import looked
from stepscope.explain.findings.evidence import (
    LOW,
    MEDIUM,
    RankEvidence,
    cost_lines,
    costly_stall,
    places,
    rule,
    severity_of,
    stall_severity,
    stalling_steps,
    typical_wait,
)
from stepscope.records.explanation import GAP_CAUSES, Finding, Place, Remedy
from stepscope.records.job import SimilarRuns
from stepscope.records.rank_facts import PlainSteps
from stepscope.records.run import OwnLine, OwnPython, RankRun, StepTimes
from stepscope.step.cuda_graphs import find_gaps_in_replays
from stepscope.text.figures import duration, percent, significant
from stepscope.text.words import counted, plural

ON_CPU = "Python between operators"  # the title on a CPU
_MUCH_OF_IDLE = 0.5  # of the time without operators
_OPERATORS, _PYTHON = GAP_CAUSES.index("operators"), GAP_CAUSES.index("python")


@rule("Host-bound")
def host_bound(evidence: RankEvidence) -> Finding | None:
    """The device waits because the host has not launched anything: Python and framework
    time. The device is idle while the launching threads are in operators or in Python."""
    share = evidence.budget_share("operators", "python")
    if share < LOW:
        return None
    asleep = _share_asleep(evidence)
    if asleep > share / 2:
        # The line that sleeps is one outside the model.
        line = _main_line(evidence, asleep)
        return host_bound.finding(
            title="Training thread sleeps",
            share=share,
            summary=f"The training thread sleeps {percent(asleep)} of the step: it waits for "
            f"something outside PyTorch{f', in {_line_words(line)}' if line else ''}. In all, no "
            f"operator runs for {percent(share)}.",
            evidence=(
                f"neither running nor waiting for a core: {evidence.step_ms(asleep)}",
                *_describe_host(evidence),
            ),
            where=_own_places(evidence) or places(evidence, (_OPERATORS, _PYTHON)),
            remedies=(
                remedies.WAIT_ELSEWHERE.offer(
                    f"Let another thread or DataLoader workers wait ahead of time for what "
                    f"{line.place.short} waits for"
                    if line
                    else ""
                ),
            ),
        )
    # A run writes down how long its threads slept when it ends.
    if evidence.on_host and (evidence.run is not None and looked(evidence.cpu)[1] is None):
        summary = (
            f"No operator runs for {percent(share)} of the step. Whether Python is busy or the "
            "training thread sleeps is known when the run ends."
        )
    elif evidence.on_host:
        summary = (
            f"No operator runs for {percent(share)} of the step because Python is busy between "
            f"operators.{_mostly_where(evidence, share)}"
        )
    else:
        summary = (
            f"The {evidence.device} is idle {percent(share)} of the step because the CPU cannot "
            "launch kernels fast enough."
        )
    return host_bound.finding(
        title=ON_CPU if evidence.on_host else "",
        share=share,
        summary=summary,
        evidence=tuple(_describe_host(evidence)),
        where=_own_places(evidence) or places(evidence, (_OPERATORS, _PYTHON)),
        remedies=_offer_for_host(evidence, share),
    )


def _own_python(evidence: RankEvidence) -> OwnPython | None:
    """What runs outside the model; None where it is not known, and for steps of a device: there
    such lines may wait for it."""
    return evidence.run.own_python if evidence.on_host and evidence.run is not None else None


def _own_places(evidence: RankEvidence) -> tuple[Place, ...]:
    own = _own_python(evidence)
    return tuple(line.place for line in own.lines) if own is not None else ()


def _main_line(evidence: RankEvidence, share: float) -> OwnLine | None:
    """The line that alone may be much of this share of the step."""
    own = _own_python(evidence)
    line = own.lines[0] if own is not None and own.lines else None
    return line if line is not None and line.share >= _MUCH_OF_IDLE * share else None


def _mostly_where(evidence: RankEvidence, share: float) -> str:
    line = _main_line(evidence, share)
    return f" Much of that is in {_line_words(line)}." if line else ""


def _line_words(line: OwnLine) -> str:
    return line.place.words + (f", inside {line.package}" if line.package else "")


def _list_own_python(evidence: RankEvidence) -> Iterator[str]:
    own = _own_python(evidence)
    if own is None:
        return
    lines = ", ".join(f"{percent(line.share)} in {_line_words(line)}" for line in own.lines)
    yield (
        f"outside the model, by {own.samples:,} sampled stacks: {percent(own.share)} of a typical "
        f"step ({percent(own.low)} to {percent(own.high)}){': ' if lines else ''}{lines}"
    )


def _share_asleep(evidence: RankEvidence) -> float:
    """How much of the time without operators the training thread sleeps, at least: not more than
    is left of its sleep when all else that it may wait for is taken off. Only on a CPU: a thread
    that waits for a device sleeps too. Without the run's steps, stalls are not known."""
    _, plain = looked(evidence.cpu)
    times = evidence.run.times if evidence.run is not None else None
    if plain is None or times is None or not evidence.on_host:
        return 0.0
    host = evidence.budget_share("operators", "python")
    elsewhere = 1.0 - host - evidence.budget_share("compute")
    return min(host, max(0.0, _asleep_in_steady_steps(plain, times) - elsewhere))


def _asleep_in_steady_steps(plain: PlainSteps, times: StepTimes) -> float:
    """As a share of them, at least: the counters also cover the warm-up and the time between
    epochs, which may have been sleep."""
    steady_ns = 1e6 * times.mean_ms * times.steps
    if plain.asleep_share is None or not steady_ns:
        return 0.0
    beside = max(0.0, plain.wall_ns - steady_ns)
    return max(0.0, plain.asleep_share * plain.wall_ns - beside) / steady_ns


def _describe_host(evidence: RankEvidence) -> Iterator[str]:
    launches = evidence.launches
    parts = {"operators": "the CPU is inside operators", "python": "Python runs between operators"}
    state = "no compute" if evidence.on_host else "idle"
    for part in sorted(parts, key=evidence.budget_share, reverse=True):
        yield f"{state} while {parts[part]}: {evidence.budget_ms(part)}"
    if launches.queue_empty_share is not None:
        yield (
            f"the launch queue is empty for {percent(launches.queue_empty_share)} of the time "
            f"(mean length {significant(launches.queue_mean or 0.0)}, longest {launches.queue_max})"
        )
    yield from _list_own_python(evidence)
    yield _describe_basis(evidence)


def _describe_basis(evidence: RankEvidence) -> str:
    if evidence.budget.basis == "measured":
        return "shares refer to the step as measured without the profiler"
    if evidence.budget.basis == "corrected":
        return (
            "shares refer to the step with the profiler's cost removed "
            "(`stepscope run` also measures the real step)"
        )
    return (
        "the profiler slows the CPU: without it this share is smaller "
        "(`stepscope run` also measures the real step)"
    )


def _offer_for_host(evidence: RankEvidence, share: float) -> tuple[Remedy, ...]:
    if evidence.on_host:
        # No torch.compile: of eight public trainings (15 to 46% Python) it made none faster.
        return (
            *_offer_own_python(evidence, share),
            remedies.BATCH.offer("Use a larger batch: each operator does more work per call"),
        )
    return (
        remedies.REDUCE_OVERHEAD.offer(),
        remedies.CUDA_GRAPHS.offer(),
        remedies.COMPILE.offer(),
        remedies.BATCH.offer("Use a larger batch: longer kernels at the same launch cost"),
        remedies.FUSED_OPTIMIZER.offer(
            "Pass fused=True to the optimizer: it saves hundreds of launches"
        ),
    )


def _offer_own_python(evidence: RankEvidence, share: float) -> Iterator[Remedy]:
    """Where much of the time lies outside the model, changing the model does not help."""
    own = _own_python(evidence)
    if own is None or not own.lines or own.low < _MUCH_OF_IDLE * share:
        return
    line = own.lines[0]
    yield remedies.OWN_PYTHON.offer(
        f"Spend less in {_line_words(line)}: it takes {percent(line.share)} of the step, outside "
        "the model, where torch.compile does not reach"
    )


SMALL_GAP_NS = 100_000
_CAUSES = tuple(GAP_CAUSES.index(cause) for cause in ("launch", "operators", "python"))


@rule("Launch-bound")
def launch_bound(evidence: RankEvidence) -> Finding | None:
    """Many small kernels: the device waits for each launch. Small gaps between kernels that
    are shorter than the time between their launches."""
    launches, gaps = evidence.launches, evidence.gaps
    if evidence.on_host or not launches.calls or not launches.kernels:
        return None
    sizes = gaps.end_ns - gaps.start_ns
    small = (sizes < SMALL_GAP_NS) & np.isin(gaps.cause, _CAUSES)
    small &= ~find_gaps_in_replays(evidence.trace, gaps.end_ns)
    share = evidence.idle_share(int(sizes[small].sum()))
    kernel_ns = sum(kernel.total_ns for kernel in evidence.kernels) / launches.device_events
    interval_ns = evidence.whole.span_ns / launches.device_events
    if share < MEDIUM or launches.short_kernels < launches.kernels / 2:
        return None
    return launch_bound.finding(
        share=share,
        summary=f"{percent(share)} of the step is lost in small gaps between kernels because "
        "launching a kernel takes longer than running it.",
        evidence=(
            f"{counted(int(small.sum()), 'gap')} under {SMALL_GAP_NS // 1000} µs: "
            f"{evidence.step_ms(share)}",
            f"a kernel or copy runs {duration(kernel_ns)} on average, and one starts every "
            f"{duration(interval_ns)}",
            f"{launches.short_kernels:,} of {counted(launches.kernels, 'kernel')} run for less "
            "than 10 µs",
            *_warn_of_profiler(evidence),
        ),
        where=places(evidence, _CAUSES),
        remedies=(
            remedies.REDUCE_OVERHEAD.offer(),
            remedies.CUDA_GRAPHS.offer(),
            remedies.COMPILE.offer("Call torch.compile(model): it fuses small kernels"),
            remedies.FUSED_OPTIMIZER.offer("Pass fused=True or foreach=True to the optimizer"),
            remedies.BATCH.offer("Use a larger batch: each kernel runs longer per launch"),
        ),
    )


def _warn_of_profiler(evidence: RankEvidence) -> tuple[str, ...]:
    if evidence.budget.basis in ("measured", "corrected"):
        return ()
    return ("the profiler slows every launch: without it this share is smaller",)


@rule("Python overhead")
def python_overhead(evidence: RankEvidence) -> Finding | None:
    """The device waits for Python code between operators. More than half of the time without
    work is Python outside operators. host-bound reports how long the device has nothing
    queued. This reports that the user's own code is the reason, which fewer or larger
    kernels do not make shorter. On a CPU the two are the same, and only host-bound is
    reported."""
    idle = evidence.idle
    if evidence.on_host or idle.python_ns <= idle.operators_ns:
        return None
    # The step of record has less idle time than the window; its causes are known for the window.
    host = evidence.budget_share("operators", "python")
    share = host * idle.python_ns / (idle.python_ns + idle.operators_ns)
    if share < LOW:
        return None
    return python_overhead.finding(
        share=share,
        summary=f"The {evidence.device} waits {percent(share)} of the step for Python code that "
        "runs between operators.",
        evidence=(
            f"idle while Python runs between operators: {evidence.step_ms(share)}",
            f"idle while the CPU is inside operators: {evidence.step_ms(host - share)}",
        ),
        where=places(evidence, (GAP_CAUSES.index("python"),)),
        remedies=(
            remedies.COMPILE.offer(
                "Call torch.compile(model): it removes Python from the model's forward pass"
            ),
            remedies.CUDA_GRAPHS.offer(
                "Capture the step with torch.cuda.graph(): no Python runs between kernels"
            ),
        ),
    )


@rule("Blocking calls")
def blocking_syncs(evidence: RankEvidence) -> Finding | None:
    """Calls that make the host wait for the device: afterwards the device waits for the
    host. Idle gaps in which a blocking call returned: it had emptied the queue."""
    idle = evidence.idle
    share = evidence.idle_share(idle.after_sync_ns)
    if evidence.on_host or share < LOW:
        return None
    calls = evidence.syncs[:3]
    return blocking_syncs.finding(
        share=share,
        summary=f"The {evidence.device} is idle {percent(share)} of the step because calls make "
        "the CPU wait for it: .item(), .cpu(), printing a tensor or synchronize().",
        evidence=(
            f"{counted(idle.after_sync_gaps, 'gap')} after blocking calls: "
            f"{evidence.step_ms(share)}",
            *(
                call.name
                + (f" in {call.operator}" if call.operator else "")
                + f": {counted(call.count, 'call')}, "
                f"{duration(call.total_ns)} on the CPU in the whole trace"
                for call in calls
            ),
        ),
        where=tuple(
            Place(file=call.file, line=call.line)
            for call in calls
            if call.file is not None and call.line is not None
        ),
        remedies=(remedies.NO_SYNC.offer(),),
    )


@rule("Garbage collection", part="run")
def gc_pauses(run: RankRun) -> Finding | None:
    """Python's garbage collector stops the training thread. Steps that are longer because a
    collection ran in them."""
    stall = costly_stall(run, "gc")
    if stall is None:
        return None
    pauses = stalling_steps(stall, run, "pauses", "pause")
    return gc_pauses.finding(
        share=stall.share,
        severity=stall_severity(stall),
        summary=f"{pauses} for {typical_wait(stall)} while Python collects garbage.",
        evidence=cost_lines(stall, run),
        where=stall.where,
        remedies=(remedies.GC_FREEZE.offer(), remedies.GC_BY_HAND.offer()),
    )


@rule("Profiler overhead")
def profiler_overhead(evidence: RankEvidence) -> Finding | None:
    """Gaps in the trace that the profiler itself causes. The device is idle while the
    profiler flushes or resizes its buffers."""
    share = evidence.budget_share("profiler")
    if share < LOW:
        return None
    return profiler_overhead.finding(
        share=share,
        severity="low" if severity_of(share) == "low" else "medium",
        summary=f"{percent(share)} of the step is the profiler's own work on its buffers. Steps "
        "without the profiler do not have it.",
        evidence=(f"in the profiler: {evidence.budget_ms('profiler')}",),
        remedies=(remedies.LIGHTER_PROFILE.offer(),),
    )


_MOSTLY_IDLE = 0.5  # of the step


@rule("One of many small trainings")
def one_of_many(evidence: RankEvidence) -> Finding | None:
    """One of many trainings leaves most of the device idle: several would train in its
    place. The GPU computes for less than half of the step, nothing but the host holds it
    back, and the run belongs to a search."""
    if evidence.on_host or (evidence.trace.world_size or 1) > 1 or evidence.collectives:
        return None
    idle = evidence.budget_share("idle_launch", "operators", "python")
    similar = evidence.similar
    if idle < _MOSTLY_IDLE or similar is None or not (similar.count or similar.options):
        return None
    computes = evidence.budget_share("compute")
    sure = similar.count > 0
    return one_of_many.finding(
        share=idle,
        severity=severity_of(idle) if sure else "low",
        summary=f"The {evidence.device} computes for only {percent(computes)} of the step. "
        f"{_belongs(similar)}",
        evidence=(
            f"waiting for the CPU and for launches: "
            f"{evidence.budget_ms('idle_launch', 'operators', 'python')}",
            "models trained together need as many launches as one model, whatever their number",
            *_other_share(evidence),
        ),
        remedies=(
            remedies.FUSE.offer(),
            remedies.CUDA_GRAPHS.offer(
                "Capture the step with torch.cuda.graph() if its shapes never change: this also "
                "ends the wait for one model alone"
            ),
        )
        if sure
        else (),
    )


def _belongs(similar: SimilarRuns) -> str:
    if similar.count:
        runs = counted(similar.count, "more run")
        found = plural(similar.count, "was", "were")
        return (
            f"It looks like one of a search: {runs} of {similar.script} with other arguments "
            f"{found} found."
        )
    return f"Its options are those of a search: {', '.join(similar.options)}."


def _other_share(evidence: RankEvidence) -> tuple[str, ...]:
    """Say what training models together cannot take away."""
    data = evidence.budget_share("data_loading")
    if data < LOW:
        return ()
    return (f"waiting for data stays: {evidence.budget_ms('data_loading')}",)
