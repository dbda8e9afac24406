"""Nothing worth changing was found. That is an answer too: what was checked, and what was not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.efficiency import above_peak
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.machine_load import looked
from stepscope.records import remedies
from stepscope.records.figures import percent, rate

if TYPE_CHECKING:
    from stepscope.explain.findings.evidence import RankEvidence
    from stepscope.records.explanation import Remedy

_ON_CPU = ("data loading", "Python between operators", "exposed communication", "copies")
_ON_GPU = (
    "data loading",
    "host and launches",
    "exposed communication",
    "copies",
    "precision and kernels",
)


def find(evidence: RankEvidence) -> Finding:
    """Always returned; left out when another finding needs attention."""
    share = evidence.budget_share("compute")
    checked, unknown = _list_checked(evidence), _list_unknown(evidence)
    idle = evidence.idle_share(evidence.timeline.idle_ns)
    return RULE.finding(
        share=share,
        severity="none",
        summary=f"the {evidence.device} computes for {percent(share)} of the step, and no single "
        "loss reaches a tenth of it.",
        evidence=(
            f"checked: {', '.join(checked)}{_describe_speed(evidence)}",
            *([f"not known: {'; '.join(unknown)}"] if unknown else []),
            f"idle {percent(idle)}, exposed communication "
            f"{percent(evidence.budget_share('exposed_comm'))}, exposed copies "
            f"{percent(evidence.budget_share('exposed_memory'))}",
        ),
        remedies=_offer(evidence),
    )


def _list_checked(evidence: RankEvidence) -> list[str]:
    if not evidence.on_host:
        return list(_ON_GPU)
    checked = list(_ON_CPU)
    use = evidence.cpu
    if use is not None:
        checked.append("operator overhead")
        if use.products and (_knows_peak(evidence) or len(use.products) > 1):
            checked.append("speed of matrix products")
        load, plain = looked(use)
        if load is not None and plain is not None:
            checked += ["threads", "other processes"]
        if load is not None and load.denormal_share is not None:
            checked.append("denormal numbers")
    return checked


def _list_unknown(evidence: RankEvidence) -> list[str]:
    """What could not be checked, and what would make it possible."""
    unknown = []
    use = evidence.cpu
    if use is not None:
        load, plain = looked(use)
        if load is None:
            unknown.append("threads and other processes (`stepscope run` records them)")
        elif plain is None:
            unknown.append(
                "threads and other processes (too few steps outside the profiler's window)"
            )
        if use.paced_share < 0.5:
            unknown.append("whether operators stall (too few calls of each)")
        if use.priced_share < 0.5 or not use.products:
            unknown.append("the work of the operators (no shapes recorded, or no matrix products)")
    if wrong := _describe_wrong_peak(evidence):
        unknown.append(wrong)
    elif not _knows_peak(evidence):
        unknown.append(f"how close this is to the best the {evidence.device} can do")
    return unknown


def _knows_peak(evidence: RankEvidence) -> bool:
    """A peak is known and plausible."""
    efficiency = evidence.efficiency
    known = efficiency is not None and bool(efficiency.peak_flops)
    return known and not _describe_wrong_peak(evidence)


def _describe_wrong_peak(evidence: RankEvidence) -> str:
    return above_peak(evidence.efficiency) if evidence.efficiency else ""


def _describe_speed(evidence: RankEvidence) -> str:
    """FLOP/s of matrix products over the whole step, against the peak of their dtype."""
    efficiency = evidence.efficiency
    if not efficiency or not efficiency.peak_flops or not efficiency.step_ms:
        return ""
    if _describe_wrong_peak(evidence):
        return ""
    achieved = rate(efficiency.model_flops / efficiency.step_ms * 1e3, "FLOP/s")
    calibrated = efficiency.peak_source == "calibrated"
    source = "measured by calibrate" if calibrated else "data sheet"
    return f"; achieved {achieved} of {rate(efficiency.peak_flops, 'FLOP/s')} ({source})"


def _offer(evidence: RankEvidence) -> tuple[Remedy, ...]:
    """Where the peak is not known, finding it out comes next."""
    if _knows_peak(evidence) or not evidence.on_host:
        return ()
    return (
        remedies.CALIBRATE.offer(
            "nothing to fix was found; run `stepscope calibrate` on the idle machine to see how "
            "close this is to the best it can do"
        ),
    )


RULE = FindingRule(id="healthy", title="Healthy", find=find)
