"""Nothing worth changing was found, which is an answer: with what was looked at, and what not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.efficiency import above_peak
from stepscope.explain.findings.rule import FindingRule
from stepscope.explain.machine_load import looked
from stepscope.records import remedies

if TYPE_CHECKING:
    from stepscope.explain.findings.evidence import RankEvidence
    from stepscope.records.explanation import Finding, Remedy

_ALWAYS = ("data loading", "Python between operators", "exposed communication", "copies")


def find(evidence: RankEvidence) -> Finding:
    """The device is busy computing and nothing else takes a tenth of the step."""
    timeline = evidence.timeline
    share = evidence.budget_share("compute")
    seen, unknown = _seen(evidence), _unknown(evidence)
    return RULE.finding(
        share=share,
        severity="none",
        summary=f"the {evidence.device} computes for {share:.0%} of the step and no single loss "
        "reaches a tenth of it.",
        evidence=(
            f"looked at: {', '.join(seen)}{_achieved(evidence)}",
            *([f"not known: {'; '.join(unknown)}"] if unknown else []),
            f"idle {evidence.idle_share(timeline.idle_ns):.1%}, exposed communication "
            f"{evidence.budget_share('exposed_comm'):.1%}, exposed copies "
            f"{evidence.budget_share('exposed_memory'):.1%}",
        ),
        remedies=_remedies(evidence),
    )


def _seen(evidence: RankEvidence) -> list[str]:
    if not evidence.on_host:
        return [*_ALWAYS[:1], "host and launches", *_ALWAYS[2:], "precision and kernels"]
    found = list(_ALWAYS)
    use = evidence.cpu
    if use is not None:
        found.append("operators' overhead")
        if use.products and (_calibrated(evidence) or len(use.products) > 1):
            found.append("products' speed")
        load, plain = looked(use)
        if load is not None and plain is not None:
            found += ["threads", "other processes"]
        if load is not None and load.denormal_share is not None:
            found.append("denormal numbers")
    return found


def _unknown(evidence: RankEvidence) -> list[str]:
    """What could not be looked at, and how it can be."""
    found = []
    use = evidence.cpu
    if use is not None:
        load, plain = looked(use)
        if load is None:
            found.append("threads and other processes (`stepscope run` records them)")
        elif plain is None:
            found.append(
                "threads and other processes (too few steps outside the profiler's window)"
            )
        if use.paced_share < 0.5:
            found.append("whether operators stall (too few calls of each)")
        if use.priced_share < 0.5 or not use.products:
            found.append("the operators' work (no shapes recorded, or no products)")
    if wrong := _wrong_peak(evidence):
        found.append(wrong)
    elif not _calibrated(evidence):
        found.append(f"how near this is to what the {evidence.device} can do at most")
    return found


def _calibrated(evidence: RankEvidence) -> bool:
    """A peak is known, and it can be right."""
    efficiency = evidence.efficiency
    return efficiency is not None and bool(efficiency.peak_flops) and not _wrong_peak(evidence)


def _wrong_peak(evidence: RankEvidence) -> str:
    return above_peak(evidence.efficiency) if evidence.efficiency else ""


def _achieved(evidence: RankEvidence) -> str:
    """Products' arithmetic over the whole step, against the peak of their dtype."""
    efficiency = evidence.efficiency
    if (
        not efficiency
        or not efficiency.peak_flops
        or not efficiency.step_ms
        or _wrong_peak(evidence)
    ):
        return ""
    reached = efficiency.model_flops / efficiency.step_ms * 1e3
    source = "measured by calibrate" if efficiency.peak_source == "calibrated" else "data sheet"
    return (
        f"; achieved {reached / 1e9:,.3g} of {efficiency.peak_flops / 1e9:,.3g} GFLOP/s ({source})"
    )


def _remedies(evidence: RankEvidence) -> tuple[Remedy, ...]:
    """Where the peak is not known, that is the next thing to find out."""
    if _calibrated(evidence) or not evidence.on_host:
        return ()
    return (
        remedies.CALIBRATE.offer(
            "nothing to fix was seen; `stepscope calibrate` on the idle machine tells how "
            "near this is to what it can do",
        ),
    )


RULE = FindingRule(id="healthy", scope="rank", title="Healthy", find=find)
