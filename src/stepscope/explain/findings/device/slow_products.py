"""Matrix products and convolutions on the CPU that run far below the machine's speed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from stepscope.explain.cpu_use import CpuUse, Product, disturbed
from stepscope.explain.findings.evidence import LOW, RankEvidence
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.roofline import MOST, shape_words
from stepscope.records import remedies
from stepscope.records.dtypes import PEAKS
from stepscope.records.explanation import Remedy
from stepscope.records.rank_facts import HostLoad
from stepscope.text.figures import duration, percent, rate
from stepscope.text.words import counted

FAR_BELOW = 0.25  # of the roof
REACHABLE = 0.5  # of the roof: what a good kernel reaches with such shapes
DENSE = 16.0  # FLOPs per byte: arithmetic is the limit on any CPU
LEAST_FLOPS = 1_000_000.0  # per call: with less, the overhead of the call decides
# PyTorch's own loops, used when no library kernel fits.
_PLAIN_LOOPS = re.compile(r"slow_conv|thnn_conv|_conv_depthwise|conv_dilated")


def find(evidence: RankEvidence) -> Finding | None:
    """Fast calls of each product, against the calibrated speed or the best product of the trace."""
    use = evidence.cpu
    if use is None or disturbed(use):
        return None
    slow = [
        (product, roof)
        for product in use.products
        if product.flops >= LEAST_FLOPS
        and (roof := _find_roof(evidence, use, product))
        and product.flops_s < FAR_BELOW * roof
    ]
    saved_ns = sum(
        product.calls * (product.quick_ns - product.flops / (REACHABLE * roof) * 1e9)
        for product, roof in slow
    )
    share = saved_ns / use.own_ns * evidence.budget_share("compute") if use.own_ns else 0.0
    if share < LOW:
        return None
    worst, roof = max(slow, key=lambda pair: pair[0].own_ns)
    known = _find_calibrated_peak(evidence, worst) is not None
    return RULE.finding(
        share=share,
        summary=f"Slow matmuls lose {percent(share)} of the step. {worst.operator} reaches "
        f"{rate(worst.flops_s, 'FLOP/s')} of {rate(roof, 'FLOP/s')} "
        f"({'measured by calibrate' if known else 'the best matmul of this trace'}).",
        evidence=(
            *(_describe(product) for product, _ in slow[:3]),
            *_list_reasons(use.load, [product.operator for product, _ in slow]),
        ),
        remedies=tuple(_offer(use.load, any("conv" in product.operator for product, _ in slow))),
    )


def _find_roof(evidence: RankEvidence, use: CpuUse, product: Product) -> float | None:
    """FLOP/s that products of this dtype reach; None for a product limited by memory."""
    if (peak := _find_calibrated_peak(evidence, product)) is not None:
        bytes_s = evidence.efficiency.ceilings.bytes_s  # type: ignore[union-attr]
        by_bytes = product.bytes_moved / bytes_s if product.bytes_moved and bytes_s else 0.0
        return min(peak, product.flops / by_bytes) if by_bytes else peak
    if not product.bytes_moved or product.flops < DENSE * product.bytes_moved:
        return None
    alike = [other for other in use.products if other.dtype == product.dtype]
    return max((other.flops_s for other in alike if other.flops >= LEAST_FLOPS), default=None)


def _find_calibrated_peak(evidence: RankEvidence, product: Product) -> float | None:
    """The peak of this dtype with as many threads as the step uses."""
    ceilings = evidence.efficiency.ceilings if evidence.efficiency else None
    dtype = PEAKS[product.dtype] if product.dtype >= 0 else ""
    if ceilings is None or dtype not in ceilings.flops:
        return None
    load = evidence.cpu.load if evidence.cpu else None
    used = load.threads / ceilings.threads if load and ceilings.threads else 1.0
    return ceilings.flops[dtype] * min(1.0, used)


def _describe(product: Product) -> str:
    return (
        f"{product.operator} {shape_words(product.shapes, MOST)}: "
        f"{rate(product.flops_s, 'FLOP/s')} in its fast calls, "
        f"{counted(product.calls, 'call')} of {duration(product.quick_ns)}"
    )


def _list_reasons(load: HostLoad | None, operators: list[str]) -> list[str]:
    lines = []
    loops = sorted({name for name in operators if _PLAIN_LOOPS.search(name)})
    if loops:
        lines.append(f"{', '.join(loops)}: PyTorch's own loop, not a vectorised library kernel")
    if load and load.onednn is False:
        lines.append(
            "oneDNN is switched off (torch.backends.mkldnn): its vectorised kernels are not used"
        )
    if load and _uses_narrow_vectors(load):
        lines.append(
            f"torch uses {load.capability} instructions, but the processor has {load.offered}"
        )
    return lines


def _uses_narrow_vectors(load: HostLoad) -> bool:
    """Narrower vectors than the processor has; choosing AVX2 is not a defect."""
    return bool(load.offered) and load.capability in ("DEFAULT", "NO AVX")


def _offer(load: HostLoad | None, convolutions: bool) -> Iterator[Remedy]:
    if load and _uses_narrow_vectors(load):
        yield remedies.VECTORS.offer()
    if load and load.onednn is False:
        yield remedies.ONEDNN.offer()
    if convolutions:
        yield remedies.CHANNELS_LAST.offer(
            "Convert model and inputs to torch.channels_last: convolutions then need no reordering"
        )
    yield remedies.BATCH.offer("Use a larger batch, and sizes that are multiples of 16")


RULE = FindingRule(id="slow-products", title="Slow matmuls", find=find)
