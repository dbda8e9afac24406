"""Find fp32 matmuls that tensor cores would compute several times faster."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import LOW, RankEvidence, costliest_places, kernel_severity
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.kernels import by_operator, callers
from stepscope.records.explanation import Place
from stepscope.records.hardware import Ceilings, DtypeUse, Efficiency, Spot
from stepscope.text.figures import percent, rate, significant

FASTER = ("tf32", "bf16", "fp16")
LEAST_GAIN = 1.5  # a faster dtype's peak over that of fp32
TF32_PER_FP32 = 3  # tf32 products that tensor cores use to emulate one product in fp32
_REMEDIES = {
    "tf32": remedies.TF32.offer(),
    "bf16": remedies.BF16.offer(
        'Run forward and loss under torch.autocast("cuda", dtype=torch.bfloat16)'
    ),
    "fp16": remedies.FP16.offer(),
}


class _Choice(msgspec.Struct, frozen=True):
    """A faster dtype: the share of the step that the products take in it, and the share saved."""

    dtype: str
    after: float
    saved: float


def find(evidence: RankEvidence) -> Finding | None:
    """Time of fp32 products minus the time of the same work in the first faster dtype."""
    efficiency = evidence.efficiency
    if efficiency is None or efficiency.ceilings is None or evidence.on_host:
        return None
    use = next((use for use in efficiency.by_dtype if use.dtype == "fp32"), None)
    if use is None:
        return None
    now = evidence.mean_step_share(use.device_ns)
    choices = [
        _Choice(dtype, after, now - after)
        for dtype in _faster(efficiency.ceilings)
        if now - (after := evidence.mean_step_share(_in_dtype(efficiency, use, dtype))) >= LOW
    ]
    if not choices:
        return None
    first = choices[0]
    peaks = efficiency.ceilings.flops
    return RULE.finding(
        share=first.saved,
        severity=kernel_severity(evidence, first.saved),
        summary=f"FP32 matmuls take {percent(now)} of the step. This {evidence.device} runs "
        f"{first.dtype.upper()} matmuls up to "
        f"{significant(peaks[first.dtype] / peaks['fp32'])} times faster.",
        evidence=tuple(_evidence(evidence, efficiency, use, choices)),
        where=_places(evidence, efficiency),
        remedies=tuple(
            _REMEDIES[choice.dtype]
            for choice in choices
            if choice.dtype != "fp16" or choice is first
        ),
    )


def _faster(ceilings: Ceilings) -> list[str]:
    base = ceilings.flops.get("fp32")
    if not base:
        return []
    return [dtype for dtype in FASTER if ceilings.flops.get(dtype, 0.0) >= LEAST_GAIN * base]


def _in_dtype(efficiency: Efficiency, use: DtypeUse, dtype: str) -> float:
    """Time in `dtype`, at the same distance from its peak as now from fp32's, but never faster
    than memory. Products that tensor cores already emulate with tf32 gain nothing from tf32.
    """
    ceilings = efficiency.ceilings
    assert ceilings is not None
    peak = ceilings.flops[dtype]
    plain = ceilings.flops["fp32"] / peak
    emulated = ceilings.flops.get("tf32", peak) / TF32_PER_FP32 / peak
    on_cores = use.tensor_core_ns / use.device_ns if use.device_ns else 0.0
    emulated = 1.0 if dtype == "tf32" else emulated
    computing = use.device_ns * ((1 - on_cores) * plain + on_cores * emulated)
    moved = sum(spot.bytes_moved or 0 for spot in efficiency.spots if _is_product(spot))
    return max(computing, moved / ceilings.bytes_s * 1e9 if ceilings.bytes_s else 0.0)


def _is_product(spot: Spot) -> bool:
    return spot.dtype == "fp32" and bool(spot.flops)


def _evidence(
    evidence: RankEvidence, efficiency: Efficiency, use: DtypeUse, choices: list[_Choice]
) -> Iterator[str]:
    assert efficiency.ceilings is not None
    flops_s = use.flops / use.device_ns * 1e9 if use.device_ns else 0.0
    peaks = {name: rate(peak, "FLOP/s") for name, peak in efficiency.ceilings.flops.items()}
    time = evidence.step_ms(evidence.mean_step_share(use.device_ns))
    yield f"matmuls in fp32: {time}, at {rate(flops_s, 'FLOP/s')} (peak {peaks['fp32']})"
    if use.tensor_core_ns > LOW * use.device_ns:
        part = evidence.mean_step_share(use.tensor_core_ns)
        yield f"of this on tensor cores, emulated with tf32: {evidence.step_ms(part)}"
    beyond = evidence.step_ms(choices[0].saved)
    yield f"beyond the same matmuls in {choices[0].dtype}, equally close to its peak: {beyond}"
    for choice in choices:
        yield f"peak in {choice.dtype}: {peaks[choice.dtype]}"
    yield f"source of the peaks: {efficiency.ceilings.source}"


def _places(evidence: RankEvidence, efficiency: Efficiency) -> tuple[Place, ...]:
    names = {spot.operator for spot in efficiency.spots if _is_product(spot)}
    trace, launched = evidence.trace, evidence.launched
    chosen = by_operator(trace, launched, names.__contains__)
    return costliest_places(trace, callers(trace, launched)[chosen], launched.dur_ns[chosen])


RULE = FindingRule(id="fp32-matmuls", title="FP32 matmuls", find=find)
