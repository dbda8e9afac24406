"""Matrix products and convolutions on the CPU far below what the machine has shown it can do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from stepscope.explain.findings.evidence import LOW, RankEvidence, severity
from stepscope.explain.findings.rule import FindingRule
from stepscope.explain.flops.dtypes import DTYPES
from stepscope.explain.machine_load import disturbed
from stepscope.explain.shapes import MOST, shape_words
from stepscope.records import remedies

if TYPE_CHECKING:
    from stepscope.explain.cpu_use import CpuUse, Product
    from stepscope.records.explanation import Finding, Remedy
    from stepscope.records.host_load import HostLoad

FAR_BELOW = 0.25  # of the roof
REACHABLE = 0.5  # of the roof: what a good kernel gets on such shapes
DENSE = 16.0  # FLOPs a byte: arithmetic decides, on any CPU
LEAST_FLOPS = 1_000_000.0  # of one call: with less, the call itself decides
# PyTorch's own loops, taken where no library kernel fits.
_PLAIN_LOOPS = re.compile(r"slow_conv|thnn_conv|_conv_depthwise|conv_dilated")


def find(evidence: RankEvidence) -> Finding | None:
    """Products at their quick pace, against calibrate's figure or the best of the same trace."""
    use = evidence.cpu
    if use is None or disturbed(use):
        return None
    slow = [
        (product, roof)
        for product in use.products
        if product.flops >= LEAST_FLOPS
        and (roof := _roof(evidence, use, product))
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
    known = _calibrated(evidence, worst) is not None
    return RULE.finding(
        share=share,
        severity=severity(share),
        summary=f"{worst.operator} reaches {worst.flops_s / 1e9:.1f} of {roof / 1e9:.0f} GFLOP/s "
        f"({'measured by calibrate' if known else 'the best product of this trace'}); at half of "
        f"that the step would save {share:.0%}.",
        evidence=(
            *(_line(product) for product, _ in slow[:3]),
            *_why(use.load, [product.operator for product, _ in slow]),
        ),
        remedies=_remedies(use.load, any("conv" in product.operator for product, _ in slow)),
    )


def _roof(evidence: RankEvidence, use: CpuUse, product: Product) -> float | None:
    """FLOP/s that products of this dtype have reached; of one bound by memory, nothing is said."""
    if (peak := _calibrated(evidence, product)) is not None:
        bytes_s = evidence.efficiency.ceilings.bytes_s  # type: ignore[union-attr]
        by_bytes = product.bytes_moved / bytes_s if product.bytes_moved and bytes_s else 0.0
        return min(peak, product.flops / by_bytes) if by_bytes else peak
    alike = [each for each in use.products if _comparable(each, product)]
    return max((each.flops_s for each in alike), default=None) if _dense(product) else None


def _calibrated(evidence: RankEvidence, product: Product) -> float | None:
    """The peak of this dtype with as many threads as the step uses."""
    ceilings = evidence.efficiency.ceilings if evidence.efficiency else None
    dtype = DTYPES[product.dtype] if product.dtype >= 0 else ""
    if ceilings is None or dtype not in ceilings.flops:
        return None
    load = evidence.cpu.load if evidence.cpu else None
    used = load.threads / ceilings.threads if load and ceilings.threads else 1.0
    return ceilings.flops[dtype] * min(1.0, used)


def _comparable(other: Product, product: Product) -> bool:
    return other.dtype == product.dtype and other.flops >= LEAST_FLOPS


def _dense(product: Product) -> bool:
    return bool(product.bytes_moved) and product.flops >= DENSE * (product.bytes_moved or 0.0)


def _line(product: Product) -> str:
    return (
        f"{product.operator} {shape_words(product.shapes, MOST)}: {product.flops_s / 1e9:.1f} "
        f"GFLOP/s at its quick pace, {product.calls:g} calls of {product.quick_ns / 1e6:.2f} ms"
    )


def _why(load: HostLoad | None, operators: list[str]) -> list[str]:
    lines = []
    loops = sorted({name for name in operators if _PLAIN_LOOPS.search(name)})
    if loops:
        lines.append(f"{', '.join(loops)}: PyTorch's own loop, no vectorised library kernel")
    if load and load.onednn is False:
        lines.append("oneDNN is off (torch.backends.mkldnn): its vectorised kernels are not used")
    if _narrow(load):
        assert load is not None
        lines.append(f"torch uses {load.capability} instructions, the processor has {load.offered}")
    return lines


def _narrow(load: HostLoad | None) -> bool:
    """torch uses narrower vectors than the processor has; AVX2 by choice is no defect."""
    return bool(load and load.offered and load.capability in ("DEFAULT", "NO AVX"))


def _remedies(load: HostLoad | None, convolutions: bool) -> tuple[Remedy, ...]:
    found = []
    if _narrow(load):
        found.append(remedies.VECTORS.offer("unset ATEN_CPU_CAPABILITY: torch picks the widest"))
    if load and load.onednn is False:
        found.append(remedies.ONEDNN.offer("torch.backends.mkldnn.enabled = True"))
    if convolutions:
        found.append(
            remedies.CHANNELS_LAST.offer(
                "model.to(memory_format=torch.channels_last), the inputs too: "
                "convolutions need no reordering",
            )
        )
    return (
        *found,
        remedies.BATCH.offer("a larger batch, and sizes that are multiples of 16"),
    )


RULE = FindingRule(id="slow-products", scope="rank", title="Products far below the roof", find=find)
