"""Half-precision products that use no tensor cores, or use them badly."""

from __future__ import annotations

import re
from collections.abc import Iterator

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import LOW, RankEvidence, kernel_severity
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.roofline import MOST, shape_words
from stepscope.records.hardware import Efficiency, Spot
from stepscope.text.figures import percent, rate

HALF = ("bf16", "fp16")
EVEN = 8  # 2-byte elements that tensor cores read at once
MATMULS = re.compile(r"^aten::(?:addmm|mm|bmm|baddbmm|linear|matmul|addbmm)$")
SLOW = 0.5  # of the roof
LONG_NS = 20_000  # per call: shorter calls are slow because they are small


def find(evidence: RankEvidence) -> Finding | None:
    """Half-precision products in kernels without tensor cores, or with sizes that slow them."""
    efficiency = evidence.efficiency
    if efficiency is None or efficiency.tensor_core_share is None or evidence.on_host:
        return None
    without_ns = sum(
        use.device_ns - use.tensor_core_ns for use in efficiency.by_dtype if use.dtype in HALF
    )
    uneven = [spot for spot in efficiency.spots if _is_slow_and_uneven(spot)]
    hindered_ns = sum(spot.gap_ns or 0.0 for spot in uneven)
    share = evidence.mean_step_share(without_ns + hindered_ns)
    if share < LOW:
        return None
    return RULE.finding(
        share=share,
        severity=kernel_severity(evidence, share),
        summary=f"{percent(share)} of the step is lost in half-precision matmuls that use no "
        "tensor cores, or whose sizes slow them down.",
        evidence=tuple(_list_evidence(evidence, efficiency, without_ns, uneven)),
        remedies=(
            remedies.COMPILE.offer(
                "Choose sizes that are multiples of 64 (a vocabulary of 50257 becomes 50304), or "
                "call torch.compile(model), which pads odd sizes where that pays"
            ),
        ),
    )


def _is_slow_and_uneven(spot: Spot) -> bool:
    """A slow product with a size that is not a multiple of 8."""
    if spot.dtype not in HALF or not MATMULS.match(spot.operator) or not spot.ceiling_flops:
        return False
    if spot.device_ns < LONG_NS * spot.calls:
        return False
    slow = (spot.achieved_flops or 0.0) < SLOW * spot.ceiling_flops
    return slow and bool(_list_uneven_sizes(spot)) and (spot.gap_ns or 0.0) > 0


def _list_uneven_sizes(spot: Spot) -> list[int]:
    sizes = [int(size) for size in re.findall(r"\d+", spot.shapes)]
    return sorted({size for size in sizes if size > EVEN and size % EVEN})


def _list_evidence(
    evidence: RankEvidence, efficiency: Efficiency, without_ns: int, uneven: list[Spot]
) -> Iterator[str]:
    if without_ns:
        time = evidence.step_ms(evidence.mean_step_share(without_ns))
        yield f"half precision without tensor cores: {time}"
    for spot in uneven[:3]:
        sizes = ", ".join(map(str, _list_uneven_sizes(spot)))
        time = evidence.step_ms(evidence.mean_step_share(spot.device_ns))
        achieved = rate(spot.achieved_flops or 0.0, "FLOP/s")
        peak = rate(spot.ceiling_flops or 0.0, "FLOP/s")
        yield (
            f"{spot.operator} {shape_words(spot.shapes, MOST)}: {sizes} is not a multiple of "
            f"{EVEN}; {achieved} of {peak}, {time}"
        )
    yield f"{percent(efficiency.tensor_core_share or 0.0)} of matmul time is on tensor cores"


RULE = FindingRule(id="tensor-cores-idle", title="Tensor cores idle", find=find)
