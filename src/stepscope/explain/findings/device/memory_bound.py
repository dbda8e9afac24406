"""Device time spent moving bytes: kernels limited by memory bandwidth."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import (
    LOW,
    RankEvidence,
    costliest_places,
    kernel_severity,
    spot_words,
)
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.flops.call import read_name
from stepscope.explain.kernels import Launched, by_kernel, by_operator, callers
from stepscope.records.hardware import Efficiency, Spot
from stepscope.step.cuda_graphs import find_replayed
from stepscope.step.work import Kind
from stepscope.text.figures import percent, rate
from stepscope.text.words import counted

if TYPE_CHECKING:
    from stepscope.step.arrays import Bools

MOSTLY = 0.25  # of the step: with less, memory is not the limit
# Kernels that already work on many tensors or for many operators.
JOINED = re.compile(r"_foreach|_fused|multi_tensor|^triton_|embedding|index")


def find(evidence: RankEvidence) -> Finding | None:
    """What passes through memory between neighbours, where memory-bound operators take long."""
    efficiency = evidence.efficiency
    if efficiency is None or evidence.on_host:
        return None
    spots = [spot for spot in efficiency.spots if spot.bound == "memory" and not spot.flops]
    trace, launched = evidence.trace, evidence.launched
    replayed = _select_replayed(evidence, launched)
    in_graphs = evidence.device_share(int(launched.dur_ns[replayed].sum()))
    moving = evidence.mean_step_share(sum(spot.device_ns for spot in spots)) + in_graphs
    if moving < MOSTLY:
        return None
    costliest = sorted(spots, key=lambda spot: -spot.device_ns)[:3]
    fits = replayed & ~by_kernel(trace, launched, JOINED.search)
    chosen = _select_fusible(evidence, launched, spots) | fits
    saved_ns, runs = _measure_saving(evidence, launched, chosen)
    saved = evidence.device_share(saved_ns)
    if saved < LOW:
        return None
    return RULE.finding(
        share=saved,
        severity=kernel_severity(evidence, saved),
        summary=f"{percent(moving)} of the step is limited by memory bandwidth. Up to "
        f"{percent(saved)} goes into passing values from one kernel to the next, which fusion "
        "avoids.",
        evidence=(
            f"operators limited by memory bandwidth: {evidence.step_ms(moving)}",
            *_describe_replayed(evidence, in_graphs),
            f"in {counted(runs, 'run')} of neighbouring kernels, values that pass through memory "
            f"take up to {evidence.step_ms(saved)}",
            *(_describe_spot(evidence, spot) for spot in costliest),
            *_describe_bandwidth(efficiency),
        ),
        where=costliest_places(trace, callers(trace, launched)[chosen], launched.dur_ns[chosen]),
        remedies=(
            remedies.COMPILE.offer("Call torch.compile(model): fused kernels read their data once"),
            remedies.BF16.offer("Use bf16 autocast: half the bytes where tensors are still fp32"),
        ),
    )


def _select_fusible(evidence: RankEvidence, launched: Launched, spots: list[Spot]) -> Bools:
    names = {spot.operator for spot in spots if not JOINED.search(spot.operator)}
    assert evidence.efficiency is not None
    # Some operators are limited by arithmetic in other shapes.
    names -= {spot.operator for spot in evidence.efficiency.spots if spot.bound == "compute"}
    bound = by_operator(evidence.trace, launched, names.__contains__)
    return bound & ~by_kernel(evidence.trace, launched, JOINED.search)


def _select_replayed(evidence: RankEvidence, launched: Launched) -> Bools:
    """Kernels of CUDA graphs without an operator, whose names say that they multiply nothing."""
    unknown = find_replayed(evidence.trace)[launched.rows] & (launched.operator < 0)
    unknown &= launched.kind == Kind.COMPUTE
    return unknown & by_kernel(evidence.trace, launched, lambda name: read_name(name).harmless)


def _describe_replayed(evidence: RankEvidence, share: float) -> tuple[str, ...]:
    if not share:
        return ()
    return (f"of these, kernels of CUDA graphs, known by their names: {evidence.step_ms(share)}",)


def _measure_saving(evidence: RankEvidence, launched: Launched, chosen: Bools) -> tuple[int, int]:
    """Time saved by fusing each run of such kernels on one stream, and the number of runs.

    A fused kernel still moves what the largest of its parts moves.
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


def _describe_spot(evidence: RankEvidence, spot: Spot) -> str:
    speed = ""
    if spot.bytes_moved and spot.device_ns:
        speed = f", {rate(spot.bytes_moved / spot.device_ns * 1e9, 'B/s')}"
    return spot_words(evidence, spot) + speed


def _describe_bandwidth(efficiency: Efficiency) -> tuple[str, ...]:
    if efficiency.ceilings is None or not efficiency.ceilings.bytes_s:
        return ()
    return (f"peak of the memory: {rate(efficiency.ceilings.bytes_s, 'B/s')}",)


RULE = FindingRule(id="memory-bound", title="Memory-bound", find=find)
