"""Findings about matmuls and convolutions that could run several times faster."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from stepscope import changes as remedies
from stepscope.explain.cpu_use import CpuUse, Product, disturbed
from stepscope.explain.findings.evidence import (
    LOW,
    RankEvidence,
    costliest_places,
    kernel_severity,
    rule,
)
from stepscope.explain.kernels import by_operator, callers
from stepscope.records.dtypes import PEAKS
from stepscope.records.explanation import Finding, Remedy
from stepscope.records.hardware import (
    MOST_SHAPES,
    Ceilings,
    DtypeUse,
    Efficiency,
    Spot,
    shape_words,
)
from stepscope.records.rank_facts import HostLoad
from stepscope.text.figures import duration, percent, rate, significant
from stepscope.text.words import counted

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


@rule("FP32 matmuls")
def fp32_matmuls(evidence: RankEvidence) -> Finding | None:
    """Find fp32 matmuls that tensor cores would compute several times faster. Time of fp32
    products minus the time of the same work in the first faster dtype."""
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
    names = {spot.operator for spot in efficiency.spots if _is_product(spot)}
    trace, launched = evidence.trace, evidence.launched
    chosen = by_operator(trace, launched, names.__contains__)
    return fp32_matmuls.finding(
        share=first.saved,
        severity=kernel_severity(evidence, first.saved),
        summary=f"FP32 matmuls take {percent(now)} of the step. This {evidence.device} runs "
        f"{first.dtype.upper()} matmuls up to "
        f"{significant(peaks[first.dtype] / peaks['fp32'])} times faster.",
        evidence=tuple(_describe_fp32(evidence, efficiency, use, choices)),
        where=costliest_places(trace, callers(trace, launched)[chosen], launched.dur_ns[chosen]),
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


def _describe_fp32(
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


HALF = ("bf16", "fp16")
EVEN = 8  # 2-byte elements that tensor cores read at once
MATMULS = re.compile(r"^aten::(?:addmm|mm|bmm|baddbmm|linear|matmul|addbmm)$")
SLOW_SHARE = 0.5  # of the roof
LONG_NS = 20_000  # per call: shorter calls are slow because they are small


@rule("Tensor cores idle")
def tensor_cores_idle(evidence: RankEvidence) -> Finding | None:
    """Half-precision products that use no tensor cores, or use them badly. Half-precision
    products in kernels without tensor cores, or with sizes that slow them."""
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
    return tensor_cores_idle.finding(
        share=share,
        severity=kernel_severity(evidence, share),
        summary=f"{percent(share)} of the step is lost in half-precision matmuls that use no "
        "tensor cores, or whose sizes slow them down.",
        evidence=tuple(_describe_idle_cores(evidence, efficiency, without_ns, uneven)),
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
    slow = (spot.achieved_flops or 0.0) < SLOW_SHARE * spot.ceiling_flops
    return slow and bool(_list_uneven_sizes(spot)) and (spot.gap_ns or 0.0) > 0


def _list_uneven_sizes(spot: Spot) -> list[int]:
    sizes = [int(size) for size in re.findall(r"\d+", spot.shapes)]
    return sorted({size for size in sizes if size > EVEN and size % EVEN})


def _describe_idle_cores(
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
            f"{spot.operator} {shape_words(spot.shapes, MOST_SHAPES)}: {sizes} is not a multiple "
            f"of {EVEN}; {achieved} of {peak}, {time}"
        )
    yield f"{percent(efficiency.tensor_core_share or 0.0)} of matmul time is on tensor cores"


FAR_BELOW = 0.25  # of the roof
REACHABLE = 0.5  # of the roof: what a good kernel reaches with such shapes
DENSE = 16.0  # FLOPs per byte: arithmetic is the limit on any CPU
LEAST_FLOPS = 1_000_000.0  # per call: with less, the overhead of the call decides
# PyTorch's own loops, used when no library kernel fits.
_PLAIN_LOOPS = re.compile(r"slow_conv|thnn_conv|_conv_depthwise|conv_dilated")


@rule("Slow matmuls")
def slow_products(evidence: RankEvidence) -> Finding | None:
    """Matrix products and convolutions on the CPU that run far below the machine's speed.
    Fast calls of each product, against the calibrated speed or the best product of the
    trace."""
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
    return slow_products.finding(
        share=share,
        summary=f"Slow matmuls lose {percent(share)} of the step. {worst.operator} reaches "
        f"{rate(worst.flops_s, 'FLOP/s')} of {rate(roof, 'FLOP/s')} "
        f"({'measured by calibrate' if known else 'the best matmul of this trace'}).",
        evidence=(
            *(
                (
                    f"{product.operator} {shape_words(product.shapes, MOST_SHAPES)}: "
                    f"{rate(product.flops_s, 'FLOP/s')} in its fast calls, "
                    f"{counted(product.calls, 'call')} of {duration(product.quick_ns)}"
                )
                for product, _ in slow[:3]
            ),
            *_list_reasons(use.load, [product.operator for product, _ in slow]),
        ),
        remedies=tuple(
            _offer_for_products(use.load, any("conv" in product.operator for product, _ in slow))
        ),
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


def _offer_for_products(load: HostLoad | None, convolutions: bool) -> Iterator[Remedy]:
    if load and _uses_narrow_vectors(load):
        yield remedies.VECTORS.offer()
    if load and load.onednn is False:
        yield remedies.ONEDNN.offer()
    if convolutions:
        yield remedies.CHANNELS_LAST.offer(
            "Convert model and inputs to torch.channels_last: convolutions then need no reordering"
        )
    yield remedies.BATCH.offer("Use a larger batch, and sizes that are multiples of 16")
