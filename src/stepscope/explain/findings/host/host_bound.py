"""The device waits because the host has not launched anything: Python and framework time."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.explain.cpu_use import looked
from stepscope.explain.findings.evidence import LOW, RankEvidence, places
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records import remedies
from stepscope.records.explanation import GAP_CAUSES, Place, Remedy
from stepscope.records.rank_facts import PlainSteps
from stepscope.records.run import OwnLine, OwnPython, StepTimes
from stepscope.text.figures import percent, significant

ON_CPU = "Python between operators"  # the title on a CPU
_MUCH = 0.5  # of the time without operators
_OPERATORS, _PYTHON = GAP_CAUSES.index("operators"), GAP_CAUSES.index("python")


def find(evidence: RankEvidence) -> Finding | None:
    """The device is idle while the launching threads are in operators or in Python."""
    share = evidence.budget_share("operators", "python")
    if share < LOW:
        return None
    asleep = _share_asleep(evidence)
    if asleep > share / 2:
        return _find_asleep(evidence, share, asleep)
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
    return RULE.finding(
        title=ON_CPU if evidence.on_host else "",
        share=share,
        summary=summary,
        evidence=tuple(_list_evidence(evidence)),
        where=_own_places(evidence) or places(evidence, (_OPERATORS, _PYTHON)),
        remedies=_offer(evidence, share),
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
    return line if line is not None and line.share >= _MUCH * share else None


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


def _find_asleep(evidence: RankEvidence, share: float, asleep: float) -> Finding:
    """The line that sleeps is one outside the model."""
    line = _main_line(evidence, asleep)
    return RULE.finding(
        title="Training thread sleeps",
        share=share,
        summary=f"The training thread sleeps {percent(asleep)} of the step: it waits for something "
        f"outside PyTorch{f', in {_line_words(line)}' if line else ''}. In all, no operator runs "
        f"for {percent(share)}.",
        evidence=(
            f"neither running nor waiting for a core: {evidence.step_ms(asleep)}",
            *_list_evidence(evidence),
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


def _list_evidence(evidence: RankEvidence) -> Iterator[str]:
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


def _offer(evidence: RankEvidence, share: float) -> tuple[Remedy, ...]:
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
    if own is None or not own.lines or own.low < _MUCH * share:
        return
    line = own.lines[0]
    yield remedies.OWN_PYTHON.offer(
        f"Spend less in {_line_words(line)}: it takes {percent(line.share)} of the step, outside "
        "the model, where torch.compile does not reach"
    )


RULE = FindingRule(id="host-bound", title="Host-bound", find=find)
