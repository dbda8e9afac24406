"""The verdicts of a step in which no loss was found."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope import changes as remedies
from stepscope.explain.cpu_use import looked
from stepscope.explain.efficiency import above_peak
from stepscope.explain.findings.evidence import MEDIUM, RankEvidence, rule
from stepscope.records.explanation import Finding, Remedy
from stepscope.records.run import RankRun
from stepscope.text.figures import milliseconds, percent, rate
from stepscope.text.words import counted


@rule("Healthy")
def healthy(evidence: RankEvidence) -> Finding | None:
    """Nothing worth changing was found. That is an answer too: what was checked, and what
    was not. Left out when another finding needs attention; None where so much is unknown
    that a loss of a tenth could hide in it."""
    if evidence.unknown_share >= MEDIUM:
        return None
    share = evidence.budget_share("compute")
    unknown = "; ".join(_list_unknown(evidence))
    idle = evidence.idle_share(evidence.timeline.idle_ns)
    return healthy.finding(
        share=share,
        severity="none",
        summary=f"The {evidence.device} computes for {percent(share)} of the step. "
        f"{_describe_variation(evidence.run)} reaches a tenth of the step.",
        evidence=(
            f"checked: {', '.join(_list_checked(evidence))}{_describe_speed(evidence)}",
            *([f"not known: {unknown}"] if unknown else []),
            f"idle {percent(idle)}, exposed communication "
            f"{percent(evidence.budget_share('exposed_comm'))}, exposed copies "
            f"{percent(evidence.budget_share('exposed_memory'))}",
            *_describe_steps(evidence.run),
        ),
        remedies=_offer_calibration(evidence),
    )


def _describe_variation(run: RankRun | None) -> str:
    """Return the beginning of a sentence; only its end where not all steps were captured."""
    if run is None or run.times is None:
        return "No single loss"
    return f"Steps vary by {percent(run.times.variation)}, and no single loss"


def _describe_steps(run: RankRun | None) -> Iterator[str]:
    """All steps of the run, and what their inputs explain."""
    if run is None or run.times is None:
        return
    times = run.times
    stalls = sum(stall.share for stall in run.stalls)
    yield (
        f"{counted(times.steps, 'step')}: {milliseconds(times.mean_ms)} on average, stalls "
        f"{percent(stalls)}, 99% take at most {milliseconds(times.p99_ms)}"
    )
    if run.inputs is not None:
        yield (
            f"inputs of {run.inputs.fewest:,} to {run.inputs.most:,} elements explain "
            f"{percent(run.inputs.explained)} of how steps differ"
        )


def _list_checked(evidence: RankEvidence) -> Iterator[str]:
    yield "data loading"
    if evidence.run is not None and evidence.run.times is not None:
        yield "stalls and drift over the run"
    yield "Python between operators" if evidence.on_host else "CPU and launches"
    yield from ("exposed communication", "copies")
    if not evidence.on_host:
        yield "precision and kernels"
    elif (use := evidence.cpu) is not None:
        yield "operator overhead"
        if use.products and (_knows_peak(evidence) or len(use.products) > 1):
            yield "speed of matmuls"
        load, plain = looked(use)
        if load is not None and plain is not None:
            yield from ("threads", "other processes")
        if load is not None and load.denormal_share is not None:
            yield "denormal numbers"


def _list_unknown(evidence: RankEvidence) -> Iterator[str]:
    """What could not be checked, and what would make it possible."""
    use = evidence.cpu
    if use is not None:
        load, plain = looked(use)
        if load is None:
            yield "threads and other processes (`stepscope run` records them)"
        elif plain is None:
            yield "threads and other processes (too few steps outside the profiler's window)"
        if use.paced_share < 0.5:
            yield "whether operators stall (too few calls of each)"
        if use.priced_share < 0.5 or not use.products:
            yield "the work of the operators (no shapes recorded, or no matmuls)"
    if wrong := _describe_wrong_peak(evidence):
        yield wrong
    elif not _knows_peak(evidence):
        yield f"how close this is to the best the {evidence.device} can do"


def _knows_peak(evidence: RankEvidence) -> bool:
    """A peak is known and plausible."""
    efficiency = evidence.efficiency
    known = efficiency is not None and bool(efficiency.peak_flops)
    return known and not _describe_wrong_peak(evidence)


def _describe_wrong_peak(evidence: RankEvidence) -> str:
    return above_peak(evidence.efficiency) if evidence.efficiency else ""


def _describe_speed(evidence: RankEvidence) -> str:
    """Return the FLOP/s of matmuls over the whole step, against the peak of their dtype."""
    efficiency = evidence.efficiency
    if not efficiency or not efficiency.peak_flops or not efficiency.step_ms:
        return ""
    if _describe_wrong_peak(evidence):
        return ""
    achieved = rate(efficiency.model_flops / efficiency.step_ms * 1e3, "FLOP/s")
    calibrated = efficiency.peak_source == "calibrated"
    source = "measured by calibrate" if calibrated else "data sheet"
    return f"; achieved {achieved} of {rate(efficiency.peak_flops, 'FLOP/s')} ({source})"


def _offer_calibration(evidence: RankEvidence) -> tuple[Remedy, ...]:
    """Where the peak is not known, finding it out comes next."""
    if _knows_peak(evidence) or not evidence.on_host:
        return ()
    return (
        remedies.CALIBRATE.offer(
            "Nothing to fix. Run `stepscope calibrate` on the idle machine to see how close this "
            "is to the best it can do"
        ),
    )


_SHOWS = "Record with `stepscope run`: it also records shapes, and what CUDA graphs compute"
_STILL = "Record a step without CUDA graphs too: `stepscope run --wait 0`"


@rule("Unknown work")
def unknown_work(evidence: RankEvidence) -> Finding | None:
    """Nothing was found, but much of the device's time is in kernels whose work is not
    known. Stands in the place of `healthy`, and is left out when another finding needs
    attention."""
    share = evidence.unknown_share
    efficiency = evidence.efficiency
    if share < MEDIUM or efficiency is None:
        return None
    return unknown_work.finding(
        share=share,
        severity="none",
        summary=f"No loss was found, but {percent(share)} of the step is in kernels whose work is "
        "not known. Their precision and speed were not checked.",
        evidence=(
            *(note for note in efficiency.notes if "lower bound" in note),
            f"the {evidence.device} computes for {percent(evidence.budget_share('compute'))} of "
            "the step",
        ),
        remedies=_offer_recording(evidence),
    )


def _offer_recording(evidence: RankEvidence) -> tuple[Remedy, ...]:
    """Nothing for other packages' kernels in a run that was recorded: they have no FLOPs."""
    if evidence.run is None:
        return (remedies.STEPSCOPE_RUN.offer(_SHOWS),)
    return (remedies.STEPSCOPE_RUN.offer(_STILL),) if evidence.is_graphed else ()
