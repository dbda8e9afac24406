"""Predict a recorded step on another GPU, or on all of the table: its kernels, its collectives, and
whether it fits into memory. The host stays as recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.flops.call import Call, Unknown, read_name
from stepscope.explain.memory.captured import CONTEXT_BYTES, SEGMENTS_SHARE, find_largest
from stepscope.predict.declaration import Refused, changed
from stepscope.predict.fitted import fitted, table
from stepscope.predict.kernel_costs import Family, after_start
from stepscope.predict.operator_library import ProbedStep, find_probed_elsewhere
from stepscope.predict.other_gpu.gpu import (
    Closeness,
    Gpu,
    closeness,
    find_row,
    gpu_rows,
    make_gpu,
    process_name,
    transfer_fit,
    unit_of,
    with_profile,
)
from stepscope.predict.other_gpu.kernel_time import find_operator, moved_ms, retime_many
from stepscope.predict.peaks import peak_at_batch
from stepscope.predict.step_context import StepContext
from stepscope.records.dtypes import PEAKS
from stepscope.records.hardware import Ceilings, PeakSource
from stepscope.records.prediction import GpuComparison, GpuPrediction
from stepscope.step.call_tree import by_text, distinct_places
from stepscope.step.replay import step_ns
from stepscope.step.work import Kind
from stepscope.text.figures import milliseconds, percent, significant, size

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.predict.engine import Bench
    from stepscope.step.graph import Flags, Floats

# A step's context on another GPU: device times moved, the host's timeline as recorded.

_HOST_DECIDES = 0.92  # of the step: a host busy this long decides it


class MovedContext(msgspec.Struct, frozen=True, kw_only=True):
    context: StepContext
    source: Gpu
    target: Gpu
    assumptions: tuple[str, ...]
    doubt: float
    modelled_share: float  # of the device time: kernels that go by bandwidth alone
    decides: str  # device or host


def source_gpu(context: StepContext) -> Gpu:
    """The GPU of the trace, with what `calibrate` measured on it if that is known."""
    name = context.trace.device_name
    if context.on_host or name is None:
        raise Refused(
            "gpu: the trace has no GPU, and a step on a CPU says nothing about one on a GPU"
        )
    row = find_row(name)
    if row is None:
        raise Refused(f"gpu: {name}, the GPU of the trace, is not in the table of GPUs")
    gpu = make_gpu(row)
    profile = next((one for one in context.profiles if find_row(one.device) == row), None)
    return with_profile(gpu, profile) if profile else gpu


def move_context(context: StepContext, target: Gpu) -> MovedContext:
    """Raises Refused if the trace's GPU is not known or the target lacks the step's units."""
    source = source_gpu(context)
    if target.row == source.row and not target.calibrated:
        target = source
    probed, problem = None, ""
    if source != target:
        probed, problem = find_probed_elsewhere(context, lambda name: find_row(name) == target.row)
    moved = move_step(context, source, target, probed)
    if moved.missing:
        raise Refused(
            f"gpu: {target.name} has no {', '.join(moved.missing)} units, which this step uses"
        )
    tasks = replace(context.graph.tasks, dur_ns=moved.dur_ns, spacing_ns=moved.spacing_ns)
    graph = replace(context.graph, tasks=tasks)
    after = replace(
        changed(context, graph),
        ceilings=_ceilings(target),
        multiprocessors=target.multiprocessors,
        is_as_traced=False,
    )
    step = step_ns(graph)
    decides = "host" if graph.host_ns >= _HOST_DECIDES * step > graph.device_ns else "device"
    return MovedContext(
        context=after,
        source=source,
        target=target,
        assumptions=(
            *_assumptions(source, target, moved, after, decides, probed),
            *((problem,) if problem else ()),
        ),
        doubt=moved.doubt,
        modelled_share=moved.unknown_share,
        decides=decides,
    )


def _ceilings(gpu: Gpu) -> Ceilings:
    """Data-sheet peaks, or what `calibrate` measured: later what-ifs price by them."""
    flops = {dtype: 1e12 * rate for dtype, rate in gpu.row.tflops.items()}
    sources: dict[str, PeakSource] = dict.fromkeys(flops, "table")
    bytes_s: float | None = None
    if gpu.profile is not None:
        flops |= gpu.profile.matmul_flops
        sources |= dict.fromkeys(gpu.profile.matmul_flops, "calibrated")
        bytes_s = gpu.profile.copy_bytes_s
    return Ceilings(
        device=gpu.name,
        flops=flops,
        bytes_s=bytes_s or 1e9 * gpu.row.bandwidth_gb_s,
        flops_source=sources,
        bytes_source="calibrated" if bytes_s else "table",
        source="the table of GPUs",
    )


def _assumptions(
    source: Gpu,
    target: Gpu,
    moved: MovedStep,
    after: StepContext,
    decides: str,
    probed: ProbedStep | None,
) -> tuple[str, ...]:
    if source == target:
        return (f"the trace was recorded on a {source.name}, so nothing changes",)
    graph = after.graph
    basis = "calibrated there" if target.calibrated else "not measured there"
    if probed is not None:
        basis = "probed there"
    lines = [
        f"{source.name} -> {target.name}, {basis}: kernels by their shapes, FLOPs and bytes",
        f"CPU time stays as recorded: {milliseconds(graph.host_ns / 1e6)} per step",
    ]
    if probed is not None:
        lines.append(probed.describe("modelled"))
    if moved.unknown_share >= 0.01:
        share = percent(moved.unknown_share)
        lines.append(
            f"{share} of the GPU's time has no FLOPs or bytes, so it is predicted from bandwidth "
            "alone"
        )
    if decides == "host":
        device = milliseconds(graph.device_ns / 1e6)
        lines.append(
            f"host-bound there: the GPU has {device} of work and waits the rest of the step"
        )
    return tuple(lines)


# The kernels of a recorded step on another GPU.
#
# Products with known shapes go through the model of tiles and waves. Other kernels take the ratio
# of the two GPUs' rooflines, by their FLOPs and bytes. A kernel of which neither is known takes the
# ratio of the rates of products if its name says that it is one, else that of bandwidths. Nothing
# is shorter than a kernel's start.

# Products of a training step come in layouts that no table has: keep half of a deviation at least.
LEAST_KEPT = 0.5
CALIBRATED = fitted("doubts.calibrated_gpu")  # of the error is left
_FALLBACK = {"tf32": "fp32"}  # a GPU without tf32 multiplies in fp32
# Spread of a kernel that goes by a ratio alone, by closeness of the GPUs.
_SPREADS = dict[Closeness, float]
_RATIO_SPREAD = table("doubts.ratio", _SPREADS)
_UNKNOWN_SPREAD = table("doubts.unknown_kernels", _SPREADS)
# Machines differ in how they wire their links: by whether source and target have the same kind.
_LINK_SPREAD = table("doubts.moved_link", tuple[float, float])
# What whole steps were off by beyond their kernels' own errors.
STEP_SPREAD = table("doubts.moved_step", _SPREADS)
# Of an operator that was timed alone on the other GPU, beyond what its time there varies by.
_TIMED_THERE = fitted("doubts.timed_there")
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
            unknown_share=0.0,
            missing=(),
        )
    rates = _Rates(context, source, target)
    ratio, unknown = _roofline_ratio(rates)
    shaped = _retime_products(rates, ratio)
    # Copies between host and device: the same host is assumed.
    crosses = context.kernels_named(lambda name: "HtoD" in name or "DtoH" in name)
    timed = np.zeros(len(ratio), np.bool_)
    if probed is not None:
        timed = probed.known & (tasks.kind == Kind.COMPUTE) & ~crosses
        ratio = _corrected(context, ratio, probed.factor, timed)
    ratio = np.where(tasks.kind == Kind.COMM, collective_ratio(context, source, target), ratio)
    ratio = np.where(crosses, 1.0, ratio)
    dur_ns = after_start(tasks.dur_ns, ratio)
    if probed is not None:
        dur_ns = np.where(timed, tasks.dur_ns * probed.factor, dur_ns)
    total = max(float(dur_ns.sum()), 1.0)
    doubt = _doubt(rates, dur_ns, shaped, unknown, timed)
    if probed is not None:
        timed_doubt = math.hypot(probed.error, _TIMED_THERE)
        doubt = math.hypot(doubt, timed_doubt * float(dur_ns[timed].sum()) / total)
    return MovedStep(
        dur_ns=dur_ns,
        spacing_ns=tasks.spacing_ns,
        doubt=doubt,
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
        self.context, self.source, self.target = context, source, target
        operators = context.operators
        self.multiplies = operators.flops > 0
        self.named = _named_dtypes(context)
        self.dtype = np.array([*PEAKS, ""])[operators.dtype]
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
    dtypes = [*PEAKS, ""]

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


def _roofline_ratio(rates: _Rates) -> tuple[Floats, Flags]:
    """By FLOPs and bytes of the operator; the ratio of bandwidths where they are not known."""
    context, source, target = rates.context, rates.source, rates.target
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
    memory = np.where(flops > 0, 1e3 * moved / gpu.bytes_s, moved_ms(moved, gpu))
    total: Floats = np.hypot(product, memory)
    return total


def _retime_products(rates: _Rates, ratio: Floats) -> Flags:
    """Put the model's ratio where a product's shape is known; tells for which tasks."""
    context, source, target = rates.context, rates.source, rates.target
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
    fit, close = transfer_fit(), closeness(source.row, target.row)
    for dtype in sorted(set(rates.dtype[rows].tolist())):
        used = dtype if dtype in source.rates and dtype in target.rates else "fp32"
        for op in ("linear", "bmm"):
            known = find_operator(op)
            chosen = [
                number
                for number, shape in enumerate(shapes)
                if shape is not None and (shape[0] > 1) == (op == "bmm")
            ]
            mine = np.isin(place, chosen) & (rates.dtype[rows] == dtype)
            if not mine.any():
                continue
            these = rows[mine]
            before_ms = time_ns[these] / 1e6
            family = known.family_in(used)
            kept = max(LEAST_KEPT, fit.kept[family][close])
            after_ms = retime_many(
                known,
                np.array([shapes[number] or () for number in place[mine].tolist()], np.float64),
                used,
                np.maximum(before_ms, 1e-4),
                source,
                target,
                fit=replace(fit, kept={family: {close: kept}}),
            )
            ratio[these] = after_ms / before_ms
            shaped[these] = True
    return shaped


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


def _doubt(rates: _Rates, dur_ns: Floats, shaped: Flags, unknown: Flags, timed: Flags) -> float:
    """Of what was not timed there. Kernels of one family err together, so their doubt does not
    shrink with their number."""
    context, source, target = rates.context, rates.source, rates.target
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


# Collectives on another GPU's links: a start, and bytes at a share of the link's rate.


def collective_ratio(context: StepContext, source: Gpu, target: Gpu) -> Floats:
    """Times of the step's collectives on the target's links, over those on the source's.

    What a collective takes beyond its start is bytes, and those go by the links' rates. Waiting for
    other ranks is in it too: the others get the same GPU.
    """
    ranks = max(2, context.trace.world_size or 2)
    tasks = context.graph.tasks
    measured_ns = np.maximum(tasks.dur_ns, 1.0)
    start = np.minimum(measured_ns, start_ns(source))
    bytes_ns = measured_ns - start
    faster = link_bytes_s(source, ranks) / link_bytes_s(target, ranks)
    then = np.minimum(start, start_ns(target)) + bytes_ns * faster
    ratio: Floats = then / measured_ns
    return ratio


def link_bytes_s(gpu: Gpu, ranks: int) -> float:
    """What an all-reduce inside a machine gets of the link, in one direction."""
    shares = _link(gpu)
    sizes = sorted(int(size) for size in shares if size.isdigit())
    nearest = max((size for size in sizes if size <= ranks), default=sizes[0])
    return shares[str(nearest)] * gpu.link_bytes_s / 2


def start_ns(gpu: Gpu) -> float:
    return 1e3 * _link(gpu)["start_us"]


def _link(gpu: Gpu) -> dict[str, float]:
    links = transfer_fit().link
    return links.get(gpu.row.link.split()[0] if gpu.row.link else "PCIe", links["PCIe"])


# Whether a step fits into another GPU's memory, and the batch that does.

_HALVINGS = 30


class MemoryFit(msgspec.Struct, frozen=True, kw_only=True):
    fits: bool | None  # None: the peak is not known
    peak_bytes: int | None
    limit_bytes: int  # what is left for tensors
    batch: int | None = None  # the largest that fits, if the batch is known
    factor: float | None = None  # the same over the present batch


def check_memory(context: StepContext, gpu: Gpu) -> MemoryFit:
    limit = round((gpu.memory_bytes - CONTEXT_BYTES) * (1 - SEGMENTS_SHARE))
    peak = _peak_bytes(context, 1.0)
    if peak is None:
        return MemoryFit(fits=None, peak_bytes=None, limit_bytes=limit)
    factor = _largest_factor(context, gpu, limit)
    batch = math.floor(context.batch * factor + 1e-9) if context.batch and factor else None
    return MemoryFit(
        fits=peak <= limit, peak_bytes=peak, limit_bytes=limit, batch=batch, factor=factor
    )


def describe_memory(context: StepContext, gpu: Gpu) -> tuple[str, ...]:
    """Whether it fits, as a sentence; nothing if the peak is not known."""
    memory = check_memory(context, gpu)
    if memory.peak_bytes is None:
        return ("peak memory was not captured, so it is unknown whether the step fits",)
    if memory.fits:
        return (f"its peak of {size(memory.peak_bytes)} fits into {size(gpu.memory_bytes)}",)
    what_fits = "No batch is known to fit"
    if memory.batch:
        what_fits = f"A batch of {memory.batch} would fit"
    elif memory.factor:
        what_fits = f"{significant(memory.factor)} of the batch would fit"
    return (
        f"it does not fit. Its peak of {size(memory.peak_bytes)} is more than the "
        f"{size(memory.limit_bytes)} that {gpu.name} leaves for tensors. {what_fits}",
    )


def _peak_bytes(context: StepContext, factor: float) -> int | None:
    if context.memory is not None and factor == 1.0:
        return context.memory.peak_bytes
    peak = peak_at_batch(context, factor)
    return peak.size_bytes if peak else None


def _largest_factor(context: StepContext, gpu: Gpu, limit: int) -> float | None:
    if context.memory is not None and context.memory.largest_batch is not None:
        largest = find_largest(
            context.memory.largest_batch.lines,
            batch=None,
            batch_from=None,
            limit_bytes=round(gpu.memory_bytes),
            limit_from="device",
        )
        return largest.factor
    # Peaks grow with the batch: halve the range that holds the largest one that fits.
    low, high = 1 / 1024, 1024.0
    least = _peak_bytes(context, low)
    if least is None or least > limit:
        return None
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        peak = _peak_bytes(context, middle)
        low, high = (middle, high) if peak is not None and peak <= limit else (low, middle)
    return low


# The step on every GPU of the table.

_HOUR_S = 3600.0


def table_gpus() -> tuple[Gpu, ...]:
    """The GPUs of the device table, those that people train on today."""
    return tuple(make_gpu(row) for row in gpu_rows() if row.device)


def compare_gpus(
    bench: Bench, gpus: Sequence[Gpu], prices: Mapping[str, float] | None = None
) -> GpuComparison:
    """Raises Refused if the step's own GPU is not known."""
    context = bench.context
    source = source_gpu(context)
    rows = [_predict_on_gpu(bench, gpu, (prices or {}).get(gpu.name)) for gpu in gpus]
    own = check_memory(context, source)
    return GpuComparison(
        source=context.trace.device_name or source.name,
        source_gpu=source.name,
        batch=context.batch,
        baseline_ms=bench.mean_ns / 1e6,
        peak_bytes=own.peak_bytes,
        gpus=tuple(sorted(rows, key=lambda row: (row.step_ms is None, row.step_ms or 0.0))),
    )


def _predict_on_gpu(bench: Bench, gpu: Gpu, price: float | None) -> GpuPrediction:
    context = bench.context
    memory = check_memory(context, gpu)
    try:
        moved = move_context(context, gpu)
    except Refused as reason:
        return GpuPrediction(
            gpu=gpu.name,
            step_ms=None,
            fits=memory.fits,
            memory_bytes=gpu.memory_bytes,
            price=price,
            why=str(reason).removeprefix("gpu: "),
        )
    step_ms, low_ms, high_ms = bench.interval_ms(moved.context, moved.doubt)
    samples = context.samples / step_ms * 1e3 if context.samples else None
    per_second = samples if samples is not None else 1e3 / step_ms
    return GpuPrediction(
        gpu=gpu.name,
        step_ms=step_ms,
        low_ms=low_ms,
        high_ms=high_ms,
        speedup=bench.mean_ns / 1e6 / step_ms,
        samples_per_s=samples,
        decides="host" if moved.decides == "host" else "device",
        device_ms=moved.context.graph.device_ns / 1e6,
        host_ms=moved.context.graph.host_ns / 1e6,
        modelled_share=moved.modelled_share,
        fits=memory.fits,
        memory_bytes=gpu.memory_bytes,
        largest_batch=memory.batch,
        price=price,
        samples_per_money=per_second * _HOUR_S / price if price else None,
        why="" if math.isfinite(step_ms) else "no step",
    )
