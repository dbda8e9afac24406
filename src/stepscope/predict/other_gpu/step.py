"""The kernels of a recorded step on another GPU.

Products with known shapes go through the model of tiles and waves. Other kernels take the ratio of
the two GPUs' rooflines, by their FLOPs and bytes. A kernel of which neither is known takes the
ratio of the rates of products if its name says that it is one, else that of bandwidths. Nothing is
shorter than a kernel's start.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.call_tree import distinct_places
from stepscope.explain.flops import DTYPES
from stepscope.explain.flops.call import Unknown
from stepscope.explain.flops.kernel_names import read_name
from stepscope.explain.work import Kind
from stepscope.predict.by_text import by_text
from stepscope.predict.kernels import FLOOR_NS, Family
from stepscope.predict.other_gpu import kernel_time
from stepscope.predict.other_gpu.fitted import transfer_fit
from stepscope.predict.other_gpu.gpu import closeness, process_name, unit_of
from stepscope.predict.other_gpu.links import collective_ratio
from stepscope.predict.other_gpu.retime import find_operator, retime_many

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.flops.call import Call
    from stepscope.explain.replay.graph import Flags, Floats
    from stepscope.predict.other_gpu.gpu import Closeness, Gpu
    from stepscope.predict.probed_step import ProbedStep
    from stepscope.predict.step_context import StepContext

# Products of a training step come in layouts that no table has: keep half of a deviation at least.
LEAST_KEPT = 0.5
CALIBRATED = 0.67  # of the error is left: 10.0 -> 6.6% on GPUs that were left out of the fit
_FALLBACK = {"tf32": "fp32"}  # a GPU without tf32 multiplies in fp32
# Spread of a kernel that goes by a ratio alone, by closeness of the GPUs.
_RATIO_SPREAD = {"chip": 0.05, "generation": 0.25, "far": 0.35}
_UNKNOWN_SPREAD = {"chip": 0.08, "generation": 0.35, "far": 0.5}
# Machines differ in how they wire their links: measured shares vary by as much.
_LINK_SPREAD = {True: 0.15, False: 0.5}
# What whole steps were off by beyond their kernels' own errors.
STEP_SPREAD = {"chip": 0.02, "generation": 0.05, "far": 0.1}
# Of an operator that was timed alone on the other GPU, beyond what its time there varies by.
_TIMED_THERE = 0.05
_FAMILIES = {
    Family.ATTENTION: "attention",
    Family.CONVOLUTION: "conv",
    Family.RECURRENT: "bmm",
    Family.MATMUL: "linear",
}


class MovedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The step's device times on the other GPU."""

    dur_ns: Floats
    spacing_ns: Floats
    doubt: float  # of the logarithm of the whole device time
    shaped_share: float  # of the device time: products whose shapes are known
    unknown_share: float  # kernels of which neither FLOPs nor bytes are known
    missing: tuple[str, ...]  # dtypes that the target has no units for


def move_step(
    context: StepContext, source: Gpu, target: Gpu, probed: ProbedStep | None = None
) -> MovedStep:
    """`probed` has the operators that were timed on the target."""
    tasks = context.graph.tasks
    if source == target:
        return MovedStep(
            dur_ns=tasks.dur_ns,
            spacing_ns=tasks.spacing_ns,
            doubt=0.0,
            shaped_share=0.0,
            unknown_share=0.0,
            missing=(),
        )
    rates = _Rates(context, source, target)
    ratio, unknown = _roofline_ratio(context, rates, source, target)
    shaped = _retime_products(context, rates, source, target, ratio)
    crosses = _crosses_the_bus(context)
    timed = np.zeros(len(ratio), np.bool_)
    if probed is not None:
        timed = probed.known & (tasks.kind == Kind.COMPUTE) & ~crosses
        ratio = _corrected(context, ratio, probed.factor, timed)
    ratio = np.where(tasks.kind == Kind.COMM, collective_ratio(context, source, target), ratio)
    ratio = np.where(crosses, 1.0, ratio)
    start = np.minimum(tasks.dur_ns, FLOOR_NS)
    dur_ns = start + (tasks.dur_ns - start) * ratio
    if probed is not None:
        dur_ns = np.where(timed, tasks.dur_ns * probed.factor, dur_ns)
    total = max(float(dur_ns.sum()), 1.0)
    doubt = _doubt(context, rates, source, target, dur_ns, shaped, unknown, timed)
    if probed is not None:
        timed_doubt = math.hypot(probed.error, _TIMED_THERE)
        doubt = math.hypot(doubt, timed_doubt * float(dur_ns[timed].sum()) / total)
    return MovedStep(
        dur_ns=dur_ns,
        spacing_ns=tasks.spacing_ns,
        doubt=doubt,
        shaped_share=float(dur_ns[shaped].sum()) / total,
        unknown_share=float(dur_ns[unknown & ~timed].sum()) / total,
        missing=rates.missing,
    )


def _corrected(context: StepContext, ratio: Floats, measured: Floats, timed: Flags) -> Floats:
    """Kernels that were not timed on the target take over what the model missed of their family,
    by as much of the family as was timed."""
    dur_ns, family = context.graph.tasks.dur_ns, context.operators.family
    corrected = ratio.copy()
    for one in Family:
        mine = (family == one) & (dur_ns > 0)
        seen = mine & timed
        if not seen.any():
            continue
        missed = np.log(measured[seen] / ratio[seen])
        share = float(dur_ns[seen].sum() / dur_ns[mine].sum())
        corrected[mine & ~timed] *= math.exp(share * np.average(missed, weights=dur_ns[seen]))
    return corrected


class _Rates:
    """FLOP/s of each task's dtype on both GPUs."""

    def __init__(self, context: StepContext, source: Gpu, target: Gpu) -> None:
        operators = context.operators
        self.multiplies = operators.flops > 0
        self.named = _named_dtypes(context)
        self.dtype = np.array([*DTYPES, ""])[operators.dtype]
        self.dtype = np.where(self.named == "", self.dtype, self.named)
        used = sorted(set(self.dtype[self.multiplies | (self.named != "")].tolist()))
        self.missing = tuple(
            dtype for dtype in used if _rate(source, dtype) and not _rate(target, dtype)
        )
        self.before, self.after = np.zeros(len(self.dtype)), np.zeros(len(self.dtype))
        for dtype in used:
            chosen = self.dtype == dtype
            self.before[chosen] = _rate(source, dtype)
            self.after[chosen] = _rate(target, dtype)

    @property
    def known(self) -> Flags:
        return self.multiplies & (self.before > 0) & (self.after > 0)


def _named_dtypes(context: StepContext) -> NDArray[np.str_]:
    """The dtype of kernels that only their names show to be products, as in a CUDA graph; empty
    for others."""
    operators, tasks = context.operators, context.graph.tasks
    silent = (operators.flops <= 0) & (operators.bytes_moved <= 0) & (tasks.kind == Kind.COMPUTE)
    dtypes = [*DTYPES, ""]

    def code(name: str) -> int:
        read = read_name(name)
        return dtypes.index(read.dtype) if read.product and read.dtype in dtypes else -1

    rows = np.where(silent, tasks.row, -1)
    codes = by_text(context.trace, context.trace.device.name, rows, code, -1)
    named: NDArray[np.str_] = np.array(dtypes)[codes]
    return named


def _rate(gpu: Gpu, dtype: str) -> float:
    used = dtype if dtype in gpu.rates else _FALLBACK.get(dtype, "")
    return gpu.model_rate(used) if used in gpu.rates else 0.0


def _roofline_ratio(
    context: StepContext, rates: _Rates, source: Gpu, target: Gpu
) -> tuple[Floats, Flags]:
    """By FLOPs and bytes of the operator; the ratio of bandwidths where they are not known."""
    operators = context.operators
    compute = context.graph.tasks.kind == Kind.COMPUTE
    moved = np.maximum(operators.bytes_moved, 0.0)
    flops = np.where(rates.known, operators.flops, 0.0)
    unknown = compute & (operators.flops <= 0) & (operators.bytes_moved <= 0)
    unknown |= compute & rates.multiplies & ~rates.known
    before = _roof_ms(flops, rates.before, moved, source)
    after = _roof_ms(flops, rates.after, moved, target)
    bandwidth = source.bytes_s / target.bytes_s
    priced = (before > 0) & ~unknown
    ratio = np.where(priced, after / np.where(priced, before, 1.0), bandwidth)
    named = unknown & (rates.named != "") & (rates.before > 0) & (rates.after > 0)
    ratio = np.where(named, rates.before / np.where(named, rates.after, 1.0), ratio)
    return ratio, unknown


def _roof_ms(flops: Floats, rate: Floats, moved: Floats, gpu: Gpu) -> Floats:
    product = 1e3 * np.divide(flops, rate, out=np.zeros(len(flops)), where=rate > 0)
    memory = np.where(flops > 0, 1e3 * moved / gpu.bytes_s, kernel_time.moved_ms(moved, gpu))
    total: Floats = np.hypot(product, memory)
    return total


def _retime_products(
    context: StepContext, rates: _Rates, source: Gpu, target: Gpu, ratio: Floats
) -> Flags:
    """Put the model's ratio where a product's shape is known; tells for which tasks."""
    operators, costs = context.operators, context.costs
    shaped = np.zeros(len(ratio), np.bool_)
    rows = np.flatnonzero((operators.family == Family.MATMUL) & rates.known & (operators.row >= 0))
    if not len(rows):
        return shaped
    signature = costs.signature[operators.row[rows]]
    signatures, place = distinct_places(signature.astype(np.int64))
    shapes = [
        product_shape(costs.calls[number]) if number >= 0 else None
        for number in signatures.tolist()
    ]
    time_ns = context.graph.tasks.dur_ns / np.maximum(operators.share, 1e-9)  # of the operator
    for dtype in sorted(set(rates.dtype[rows].tolist())):
        used = dtype if dtype in source.rates and dtype in target.rates else "fp32"
        for op in ("linear", "bmm"):
            chosen = [
                number
                for number, shape in enumerate(shapes)
                if shape is not None and (shape[0] > 1) == (op == "bmm")
            ]
            mine = np.isin(place, chosen) & (rates.dtype[rows] == dtype)
            if not mine.any():
                continue
            these = rows[mine]
            table = np.array([shapes[number] or () for number in place[mine].tolist()], np.float64)
            before_ms = time_ns[these] / 1e6
            after_ms = _retime(op, table, used, before_ms, source, target)
            ratio[these] = after_ms / before_ms
            shaped[these] = True
    return shaped


def _retime(
    op: str, shapes: Floats, dtype: str, ms: Floats, source: Gpu, target: Gpu
) -> NDArray[np.float64]:
    known, fit = find_operator(op), transfer_fit()
    family, close = known.family_in(dtype), closeness(source.row, target.row)
    kept = max(LEAST_KEPT, fit.kept[family][close])
    fit = replace(fit, kept={family: {close: kept}})
    return retime_many(known, shapes, dtype, np.maximum(ms, 1e-4), source, target, fit=fit)


def product_shape(call: Call) -> tuple[float, float, float, float] | None:
    """(batch, m, n, k) of a matrix product; None if the call does not say."""
    first = 1 if "add" in call.name else 0
    try:
        a, b = call.tensor(first).dims, call.tensor(first + 1).dims
    except Unknown:
        return None
    if call.name.endswith("linear"):
        b = b[::-1]
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
        return None
    if len(b) == 2:
        return 1.0, float(math.prod(a[:-1])), float(b[-1]), float(a[-1])
    return float(math.prod(a[:-2])), float(a[-2]), float(b[-1]), float(a[-1])


def _crosses_the_bus(context: StepContext) -> Flags:
    """Copies between host and device: the same host is assumed."""
    rows = context.graph.tasks.row
    names = context.trace.device.name
    return by_text(context.trace, names, rows, lambda name: "HtoD" in name or "DtoH" in name, False)


def _doubt(
    context: StepContext,
    rates: _Rates,
    source: Gpu,
    target: Gpu,
    dur_ns: Floats,
    shaped: Flags,
    unknown: Flags,
    timed: Flags,
) -> float:
    """Of what was not timed there. Kernels of one family err together, so their doubt does not
    shrink with their number."""
    fit, close = transfer_fit(), closeness(source.row, target.row)
    total = max(float(dur_ns.sum()), 1.0)
    comm = context.graph.tasks.kind == Kind.COMM
    sent = float(dur_ns[comm].sum()) / total
    same_link = source.row.link == target.row.link
    left = 1.0 - float(dur_ns[timed].sum()) / total
    variance = (left * STEP_SPREAD[close]) ** 2 + (sent * _LINK_SPREAD[same_link]) ** 2
    for family in Family:
        mine = (context.operators.family == family) & ~unknown & ~comm & ~timed
        share = float(dur_ns[mine].sum()) / total
        if not share:
            continue
        spread = _family_spread(family, rates.dtype[mine], bool(shaped[mine].all()), close)
        if family != Family.OTHER:
            spread = math.hypot(spread, _ceiling_doubt(rates.dtype[mine], target, close))
        variance += (share * spread * fit.common) ** 2
    lost = float(dur_ns[unknown & ~timed].sum()) / total
    variance += (lost * _UNKNOWN_SPREAD[close]) ** 2
    doubt = math.sqrt(variance)
    return CALIBRATED * doubt if target.calibrated else doubt


def _family_spread(
    family: Family, dtypes: NDArray[np.str_], shaped: bool, close: Closeness
) -> float:
    """Of kernels left out of the fit; at least a ratio's own where shapes are not known."""
    spread = transfer_fit().spread
    name = _FAMILIES.get(family, "elementwise")
    if name == "linear" and any(unit_of(dtype) == "tensor" for dtype in set(dtypes.tolist())):
        name = "tensor"
    if family == Family.OTHER or shaped:
        return spread[name][close]
    return max(_RATIO_SPREAD[close], spread[name][close])


def _ceiling_doubt(dtypes: NDArray[np.str_], target: Gpu, close: Closeness) -> float:
    """For a rate that no measured GPU of the generation shows."""
    fit = transfer_fit()
    estimated = any(
        f"{process_name(target.row)} {unit_of(dtype)}" in fit.power.estimated
        for dtype in set(dtypes.tolist())
        if dtype
    )
    return fit.estimated if estimated and close != "chip" else 0.0
