"""Device time that goes to moving bytes: kernels whose roof is the memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.findings.evidence import (
    LOW,
    RankEvidence,
    costliest_places,
    kernel_severity,
    spot_words,
)
from stepscope.explain.findings.rule import FindingRule
from stepscope.explain.window_kernels import by_kernel, by_operator, callers
from stepscope.records import remedies
from stepscope.records.words import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.window_kernels import Launched
    from stepscope.records.efficiency import Efficiency, Spot
    from stepscope.records.explanation import Finding

MOSTLY = 0.25  # of the step: with less than that, memory is not what binds it
# Already one kernel for many tensors, or one for many operators.
JOINED = re.compile(r"_foreach|_fused|multi_tensor|^triton_|embedding|index")


def find(evidence: RankEvidence) -> Finding | None:
    """What joining neighbours would save, where operators bound by memory take much of a step."""
    efficiency = evidence.efficiency
    if efficiency is None or evidence.on_host:
        return None
    spots = [spot for spot in efficiency.spots if spot.bound == "memory" and not spot.flops]
    moving = evidence.mean_step_share(sum(spot.device_ns for spot in spots))
    if moving < MOSTLY:
        return None
    trace, launched = evidence.trace, evidence.launched
    chosen = _fusible(evidence, launched, spots)
    saved_ns, runs = _saved(evidence, launched, chosen)
    saved = evidence.device_share(saved_ns)
    if saved < LOW:
        return None
    return RULE.finding(
        share=saved,
        severity=kernel_severity(evidence, saved),
        summary=f"{moving:.0%} of the step moves data rather than computes; joining neighbouring "
        f"kernels would save up to {saved:.0%} of it.",
        evidence=(
            f"operators bound by memory: {evidence.step_ms(moving)}",
            f"{counted(runs, 'run')} of neighbours: all but the longest of each is "
            f"{evidence.step_ms(saved)}",
            *(_line(evidence, spot) for spot in _costliest(spots)),
            *_bandwidth(efficiency),
        ),
        where=costliest_places(trace, callers(trace, launched)[chosen], launched.dur_ns[chosen]),
        remedies=(
            remedies.COMPILE.offer("torch.compile joins neighbours: data is read once"),
            remedies.BF16.offer("half the bytes where tensors are still fp32"),
        ),
    )


def _fusible(evidence: RankEvidence, launched: Launched, spots: list[Spot]) -> NDArray[np.bool_]:
    names = {spot.operator for spot in spots if not JOINED.search(spot.operator)}
    names -= {spot.operator for spot in _computing(evidence)}
    bound = by_operator(evidence.trace, launched, names.__contains__)
    return bound & ~by_kernel(evidence.trace, launched, JOINED.search)


def _computing(evidence: RankEvidence) -> list[Spot]:
    """Operators that other shapes make bound by arithmetic: products stay what they are."""
    assert evidence.efficiency is not None
    return [spot for spot in evidence.efficiency.spots if spot.bound == "compute"]


def _saved(
    evidence: RankEvidence, launched: Launched, chosen: NDArray[np.bool_]
) -> tuple[int, int]:
    """Over runs of such kernels on one stream: their time less the longest of each, and the runs.

    The kernel that joins a run still moves what its largest member moves.
    """
    if not chosen.any():
        return 0, 0
    stream = evidence.trace.device.stream[launched.rows]
    order = np.argsort(stream, kind="stable")  # rows are in order of start
    fits, lane, dur = chosen[order], stream[order], launched.dur_ns[order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (fits[1:] != fits[:-1]) | (lane[1:] != lane[:-1])
    starts = np.flatnonzero(begins)
    total, longest = np.add.reduceat(dur, starts), np.maximum.reduceat(dur, starts)
    length = np.diff(np.append(starts, len(order)))
    runs = fits[starts] & (length > 1)
    return int((total - longest)[runs].sum()), int(runs.sum())


def _costliest(spots: list[Spot]) -> list[Spot]:
    return sorted(spots, key=lambda spot: -spot.device_ns)[:3]


def _line(evidence: RankEvidence, spot: Spot) -> str:
    rate = ""
    if spot.bytes_moved and spot.device_ns:
        rate = f", {spot.bytes_moved / spot.device_ns / 1e3:.2f} TB/s"
    return f"{spot_words(evidence, spot)}{rate}"


def _bandwidth(efficiency: Efficiency) -> tuple[str, ...]:
    if efficiency.ceilings is None or not efficiency.ceilings.bytes_s:
        return ()
    return (f"the memory moves at most {efficiency.ceilings.bytes_s / 1e12:.2f} TB/s",)


RULE = FindingRule(id="memory-bound", scope="rank", title="Bound by memory", find=find)
