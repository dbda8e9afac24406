"""Matrix products in fp32, where tensor cores would do them several times faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.explain.findings.evidence import (
    LOW,
    RankEvidence,
    costliest_places,
    kernel_severity,
)
from stepscope.explain.findings.rule import FindingRule
from stepscope.explain.window_kernels import by_operator, callers
from stepscope.records import remedies

if TYPE_CHECKING:
    from stepscope.records.efficiency import Ceilings, DtypeUse, Efficiency, Spot
    from stepscope.records.explanation import Finding, Place

FASTER = ("tf32", "bf16", "fp16")
LEAST_GAIN = 1.5  # of a peak over that of fp32
PRODUCTS_OF_ONE = 3  # tf32 products in which tensor cores make one of nearly full fp32
_REMEDIES = {
    "tf32": remedies.TF32.offer(
        'torch.set_float32_matmul_precision("high"): fp32 tensors, products in tf32',
    ),
    "bf16": remedies.BF16.offer(
        'torch.autocast("cuda", dtype=torch.bfloat16) around forward and loss'
    ),
    "fp16": remedies.FP16.offer('torch.autocast("cuda", dtype=torch.float16) with a GradScaler'),
}


class _Choice(msgspec.Struct, frozen=True):
    """A faster dtype, what the products take in it, and what that saves; parts of the step."""

    dtype: str
    after: float
    saved: float


def find(evidence: RankEvidence) -> Finding | None:
    """Matmul-like time in fp32 less what the same work takes in a dtype that is faster."""
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
    return RULE.finding(
        share=first.saved,
        severity=kernel_severity(evidence, first.saved),
        summary=f"{now:.0%} of the step is matrix products in fp32; in {first.dtype} they would "
        f"take about {first.after:.0%} of it.",
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
    """As far below the dtype's peak as it is below fp32's now, but never faster than memory.

    What tensor cores already do in several tf32 products stays as it is in tf32.
    """
    ceilings = efficiency.ceilings
    assert ceilings is not None
    peak = ceilings.flops[dtype]
    plain = ceilings.flops["fp32"] / peak
    emulated = ceilings.flops.get("tf32", peak) / PRODUCTS_OF_ONE / peak
    on_cores = use.tensor_core_ns / use.device_ns if use.device_ns else 0.0
    emulated = 1.0 if dtype == "tf32" else emulated
    computing = use.device_ns * ((1 - on_cores) * plain + on_cores * emulated)
    moved = sum(spot.bytes_moved or 0 for spot in efficiency.spots if _is_product(spot))
    return max(computing, moved / ceilings.bytes_s * 1e9 if ceilings.bytes_s else 0.0)


def _is_product(spot: Spot) -> bool:
    return spot.dtype == "fp32" and bool(spot.flops)


def _evidence(
    evidence: RankEvidence, efficiency: Efficiency, use: DtypeUse, choices: list[_Choice]
) -> list[str]:
    assert efficiency.ceilings is not None
    reached = use.flops / use.device_ns / 1e3 if use.device_ns else 0.0
    time = evidence.step_ms(evidence.mean_step_share(use.device_ns))
    lines = [
        f"in fp32: {time}, at {reached:.0f} of "
        f"{efficiency.ceilings.flops['fp32'] / 1e12:.0f} TFLOP/s",
    ]
    if use.tensor_core_ns > LOW * use.device_ns:
        part = evidence.mean_step_share(use.tensor_core_ns)
        lines.append(
            f"of it on tensor cores, several tf32 products for one: {evidence.step_ms(part)}"
        )
    lines += [
        f"as close to the peak of {choice.dtype} "
        f"({efficiency.ceilings.flops[choice.dtype] / 1e12:.0f} TFLOP/s): "
        f"{evidence.step_ms(choice.after)}"
        for choice in choices
    ]
    return [*lines, f"peaks: {efficiency.ceilings.source}"]


def _places(evidence: RankEvidence, efficiency: Efficiency) -> tuple[Place, ...]:
    names = {spot.operator for spot in efficiency.spots if _is_product(spot)}
    trace, launched = evidence.trace, evidence.launched
    chosen = by_operator(trace, launched, names.__contains__)
    return costliest_places(trace, callers(trace, launched)[chosen], launched.dur_ns[chosen])


RULE = FindingRule(id="fp32-matmuls", scope="rank", title="Matrix products in fp32", find=find)
