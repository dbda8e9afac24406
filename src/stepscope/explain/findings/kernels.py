"""Findings about the device's kernels and copies: size, bandwidth, layout, the optimizer's."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import msgspec
import numpy as np

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import (
    LOW,
    MEDIUM,
    RankEvidence,
    costliest_places,
    kernel_severity,
    rule,
    severity_of,
    spot_words,
)
from stepscope.explain.flops.call import read_name
from stepscope.explain.kernels import SHORT_KERNEL_NS, Launched, by_kernel, by_operator, callers
from stepscope.records.explanation import Finding, Remedy
from stepscope.records.hardware import Spot, above_peak
from stepscope.records.normal import median
from stepscope.records.trace import DeviceKind, HostKind, Trace
from stepscope.step.arrays import Bools, Floats, Int32s, Int64s
from stepscope.step.call_tree import group, sum_by
from stepscope.step.cuda_graphs import find_replayed
from stepscope.step.phases import in_optimizer_step
from stepscope.step.work import Kind, named, one_of, rows_named
from stepscope.text.figures import duration, milliseconds, percent, rate, significant
from stepscope.text.words import counted, plural
from stepscope.trace.links import distinct, nearest_of

MOSTLY = 0.25  # of the step: with less, memory is not the limit
# Kernels that already work on many tensors or for many operators.
JOINED = re.compile(r"_foreach|_fused|multi_tensor|^triton_|embedding|index")


@rule("Memory-bound")
def memory_bound(evidence: RankEvidence) -> Finding | None:
    """Device time spent moving bytes: kernels limited by memory bandwidth. What passes
    through memory between neighbours, where memory-bound operators take long."""
    efficiency = evidence.efficiency
    if efficiency is None or evidence.on_host:
        return None
    spots = [spot for spot in efficiency.spots if spot.bound == "memory" and not spot.flops]
    trace, launched = evidence.trace, evidence.launched
    # Kernels of CUDA graphs without an operator, whose names say that they multiply nothing.
    unknown = find_replayed(evidence.trace)[launched.rows] & (launched.operator < 0)
    unknown &= launched.kind == Kind.COMPUTE
    replayed = unknown & by_kernel(evidence.trace, launched, lambda name: read_name(name).harmless)
    in_graphs = evidence.device_share(int(launched.dur_ns[replayed].sum()))
    moving = evidence.mean_step_share(sum(spot.device_ns for spot in spots)) + in_graphs
    if moving < MOSTLY:
        return None
    costliest = sorted(spots, key=lambda spot: -spot.device_ns)[:3]
    fits = replayed & ~by_kernel(trace, launched, JOINED.search)
    names = {spot.operator for spot in spots if not JOINED.search(spot.operator)}
    assert evidence.efficiency is not None
    # Some operators are limited by arithmetic in other shapes.
    names -= {spot.operator for spot in evidence.efficiency.spots if spot.bound == "compute"}
    bound = by_operator(evidence.trace, launched, names.__contains__)
    chosen = (bound & ~by_kernel(evidence.trace, launched, JOINED.search)) | fits
    saved_ns, runs = _measure_saving(evidence, launched, chosen)
    saved = evidence.device_share(saved_ns)
    if saved < LOW:
        return None
    if efficiency.ceilings is None or not efficiency.ceilings.bytes_s:
        bandwidth: tuple[str, ...] = ()
    else:
        bandwidth = (f"peak of the memory: {rate(efficiency.ceilings.bytes_s, 'B/s')}",)
    return memory_bound.finding(
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
            *bandwidth,
        ),
        where=costliest_places(trace, callers(trace, launched)[chosen], launched.dur_ns[chosen]),
        remedies=(
            remedies.COMPILE.offer("Call torch.compile(model): fused kernels read their data once"),
            remedies.BF16.offer("Use bf16 autocast: half the bytes where tensors are still fp32"),
        ),
    )


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


TRANSPOSING = one_of("nchwto nhwcto batched_transpose transpose_readwrite")
COPYING = re.compile(r"^aten::(?:copy_|clone)$")
BACKWARD = "autograd::engine::evaluate_function: "
LAYING_OUT = re.compile(r"^aten::(?:contiguous|reshape)$")


@rule("Copies that only change layout")
def layout_copies(evidence: RankEvidence) -> Finding | None:
    """Copies that only change a tensor's layout in memory. Transposing kernels, and the
    copies that `contiguous` and `reshape` make."""
    if evidence.on_host:
        return None
    trace, launched = evidence.trace, evidence.launched
    in_convolution = by_kernel(trace, launched, TRANSPOSING)
    # The nearest operator around each kernel that is not itself a copy, or -1.
    around = nearest_of(trace.host, _operators_but(trace, COPYING), launched.operator)
    chosen = in_convolution | _select_layout_copies(trace, launched, around)
    share = evidence.device_share(int(launched.dur_ns[chosen].sum()))
    if share < LOW:
        return None
    return layout_copies.finding(
        share=share,
        severity=kernel_severity(evidence, share),
        summary=f"{percent(share)} of the step goes into copies that only change a tensor's memory "
        "layout, not its values.",
        evidence=(
            f"{counted(int(chosen.sum()), 'such kernel')} in the recorded steps: "
            f"{evidence.step_ms(share)}",
            *_list_causes(evidence, chosen, around),
        ),
        where=costliest_places(trace, callers(trace, launched)[chosen], launched.dur_ns[chosen]),
        remedies=_offer_for_layout(bool(in_convolution.any())),
    )


def _operators_but(trace: Trace, these: re.Pattern[str]) -> Bools:
    operator: Bools = trace.host.kind == HostKind.OPERATOR
    return operator & ~rows_named(trace, trace.host, operator, these.match)


def _select_layout_copies(trace: Trace, launched: Launched, around: Int32s) -> Bools:
    """Copies made by an operator that changes the layout."""
    known = by_operator(trace, launched, COPYING.match) & (around >= 0)
    if not known.any():
        return known
    return named(trace, trace.host.name[around], known, LAYING_OUT.match)


def _list_causes(evidence: RankEvidence, chosen: Bools, around: Int32s) -> list[str]:
    """The operators that caused the copies, the costliest first."""
    trace, host = evidence.trace, evidence.trace.host
    asks = chosen & (around >= 0)
    if not asks.any():
        return []
    asking = nearest_of(host, _operators_but(trace, LAYING_OUT), np.where(asks, around, -1))
    asking = np.where(asking >= 0, asking, around)[asks]
    first, inverse, count = group(host.name[asking])
    total = sum_by(inverse, evidence.launched.dur_ns[asks], count)
    calls = np.bincount(inverse, minlength=count)
    return [
        f"for {trace.strings[host.name[asking[first[i]]]].removeprefix(BACKWARD)}: "
        f"{counted(int(calls[i]), 'kernel')}, "
        f"{evidence.step_ms(evidence.device_share(int(total[i])))}"
        for i in np.argsort(-total, kind="stable")[:3].tolist()
    ]


def _offer_for_layout(in_convolution: bool) -> tuple[Remedy, ...]:
    fuse = remedies.COMPILE.offer(
        "Call torch.compile(model): it folds such copies into the kernels beside them"
    )
    if not in_convolution:
        return (fuse,)
    keep = "Convert model and inputs to torch.channels_last: convolutions then need no copies"
    return (remedies.CHANNELS_LAST.offer(keep), fuse)


_TOO_MANY = 1 << 62  # of a damaged file
SHORT_NS = 20_000  # longer kernels with few blocks are built that way


@rule("Kernels too small")
def small_batch(evidence: RankEvidence) -> Finding | None:
    """Kernels with too little work for all multiprocessors. Most kernel time is short
    kernels with fewer blocks than the device has multiprocessors."""
    trace, launched = evidence.trace, evidence.launched
    units = _count_multiprocessors(trace)
    if evidence.on_host or units is None:
        return None
    # Blocks of each kernel's grid; 0 where it is not recorded.
    grid = trace.device.grid[launched.rows]
    first, inverse, _ = group(grid)
    sizes = [_parse_grid(trace.strings[code]) if code >= 0 else 0 for code in grid[first].tolist()]
    blocks = np.array(sizes, np.int64)[inverse]
    known = (blocks > 0) & (launched.kind == Kind.COMPUTE)
    filled = np.minimum(1.0, blocks / units)
    small = known & (filled < 1) & (launched.dur_ns < SHORT_NS)
    busy = int(launched.dur_ns[known].sum())
    lost = evidence.device_share(float((launched.dur_ns * (1 - filled))[small].sum()))
    if lost < LOW or 2 * launched.dur_ns[small].sum() < busy:
        return None
    return small_batch.finding(
        share=lost,
        severity=kernel_severity(evidence, lost),
        summary=f"{percent(lost)} of the step is lost because most kernels are too small to fill "
        f"the {evidence.device}'s {units} multiprocessors.",
        evidence=(
            f"{int(small.sum()):,} of {counted(int(known.sum()), 'kernel')} have fewer blocks than "
            f"multiprocessors: {percent(launched.dur_ns[small].sum() / busy)} of kernel time",
            f"while they run, {percent(_mean(filled[small], launched.dur_ns[small]))} of the "
            "multiprocessors have work",
            f"the median kernel runs {duration(median(launched.dur_ns[known]))} with "
            f"{counted(int(median(blocks[known])), 'block')}",
            f"idle between kernels: {evidence.budget_ms('idle_launch', 'operators', 'python')}",
        ),
        remedies=(
            remedies.BATCH.offer("Use a larger batch: more blocks run in the same time"),
            remedies.COMPILE.offer("Call torch.compile(model): it fuses small kernels"),
            remedies.CUDA_GRAPHS.offer(
                "If the batch cannot grow, capture the step with torch.cuda.graph() and replay it"
            ),
        ),
    )


def _count_multiprocessors(trace: Trace) -> int | None:
    """Of the device in use; CUDA only, because AMD's profiler counts grids in threads."""
    used = set(trace.device.device.tolist())
    known = [device.multiprocessors for device in trace.devices if device.id in used]
    return known[0] if trace.kind == "cuda" and known and known[0] > 0 else None


def _parse_grid(grid: str) -> int:
    try:
        blocks = math.prod(int(side) for side in msgspec.json.decode(grid))
    except (TypeError, ValueError, msgspec.DecodeError):
        return 0
    return blocks if blocks < _TOO_MANY else 0


def _mean(values: Floats, weights: Int64s) -> float:
    return float((values * weights).sum() / max(1, weights.sum()))


@rule("Short kernels")
def short_kernels(evidence: RankEvidence) -> Finding | None:
    """Device time in kernels too short to use the device well. Most kernels are short, and
    together they take a visible share of the step."""
    launches, timeline = evidence.launches, evidence.timeline
    if evidence.on_host or not launches.kernels:
        return None
    whole = sum(kernel.total_ns for kernel in evidence.kernels) or 1
    busy = 1 - evidence.idle_share(timeline.idle_ns)
    kernels, short, short_ns = _count_outside_graphs(evidence)
    share = short_ns / whole * busy
    if share < LOW or short < kernels / 2:
        return None
    return short_kernels.finding(
        share=share,
        severity="low" if severity_of(share) == "low" else "medium",
        summary=f"{percent(share)} of the step goes into kernels shorter than "
        f"{SHORT_KERNEL_NS // 1000} µs: {short:,} of {counted(kernels, 'kernel')}.",
        evidence=(
            "mean duration of these: " + duration(short_ns / max(1, short)),
            "such a kernel mostly starts up and drains, so few multiprocessors work",
        ),
        remedies=(
            remedies.COMPILE.offer("Call torch.compile(model): it fuses elementwise kernels"),
            remedies.BATCH.offer("Use a larger batch: each kernel has more to do"),
        ),
    )


def _count_outside_graphs(evidence: RankEvidence) -> tuple[int, int, int]:
    """Kernels, short ones and their time. In a graph a short kernel is launched with all others,
    and what it costs shows in the gap to its roof."""
    device, launches = evidence.trace.device, evidence.launches
    inside = find_replayed(evidence.trace) & (device.kind == DeviceKind.KERNEL)
    short = inside & (device.dur_ns < SHORT_KERNEL_NS)
    return (
        launches.kernels - int(inside.sum()),
        launches.short_kernels - int(short.sum()),
        launches.short_kernels_ns - int(device.dur_ns[short].sum()),
    )


DOMINANT = 0.40
_GPU_ADVICE = "Run this kernel in bf16 if it supports that: use torch.autocast"
# Without such instructions bf16 is many times slower.
_CPU_ADVICE = "Use bf16 if this CPU has instructions for it: `stepscope probe` shows whether it has"


@rule("One dominant kernel")
def dominant_kernel(evidence: RankEvidence) -> Finding | None:
    """One kernel that takes most of the device's time. A compute kernel with at least 40% of
    all device time."""
    whole = sum(kernel.total_ns for kernel in evidence.kernels)
    compute = [kernel for kernel in evidence.kernels if kernel.kind == "compute"]
    if not compute or len(evidence.kernels) < 3:
        return None
    if not whole or compute[0].total_ns < DOMINANT * whole:
        return None
    top = compute[0]
    busy = 1 - evidence.idle_share(evidence.timeline.idle_ns)
    share = top.total_ns / whole * busy
    word = "operator" if evidence.on_host else "kernel"
    return dominant_kernel.finding(
        title="One dominant operator" if evidence.on_host else "",
        share=share,
        severity="low",
        summary=f"One {word} takes {percent(top.total_ns / whole)} of all {evidence.device} time. "
        "Speeding up anything else changes little.",
        evidence=(
            top.name,
            f"{counted(top.count, 'call')}, {duration(top.total_ns / top.count)} each",
        ),
        remedies=(remedies.BF16.offer(_CPU_ADVICE if evidence.on_host else _GPU_ADVICE),),
    )


_MOST_SPOTS = 3
# Of a peak: what good kernels reach. Time above it is what another kernel may save.
REACHABLE = 0.8


@rule("Kernels far below the peak")
def below_roof(evidence: RankEvidence) -> Finding | None:
    """What still costs in a compiled or graphed step: the widest gaps to the device's peak
    rates. The operators that lose most. An eager step has simpler findings: fusion,
    precision."""
    efficiency = evidence.efficiency
    if evidence.on_host or efficiency is None or above_peak(efficiency):
        return None
    if not evidence.is_compiled and not evidence.is_graphed:
        return None
    # Per step; 0 where the roof is not known.
    lost = sorted(
        (
            ((spot.device_ns - spot.roof_ns / REACHABLE if spot.roof_ns is not None else 0.0), spot)
            for spot in efficiency.spots
        ),
        key=lambda row: -row[0],
    )
    widest = [(ns, spot) for ns, spot in lost[:_MOST_SPOTS] if ns > 0]
    share = evidence.mean_step_share(sum(ns for ns, _ in widest))
    if share < LOW:
        return None
    return below_roof.finding(
        share=share,
        severity="medium" if share >= MEDIUM else "low",
        summary=f"{percent(share)} of the step is lost because "
        f"{counted(len(widest), 'operator')} {plural(len(widest), 'runs', 'run')} below "
        f"{percent(REACHABLE)} of the {evidence.device}'s peak. The costliest is "
        f"{_named(widest[0][1])}.",
        evidence=tuple(_describe_gap(evidence, ns, spot) for ns, spot in widest),
        remedies=tuple(_offer_for_spots([spot for _, spot in widest])),
    )


def _named(spot: Spot) -> str:
    return f"{spot.operator} of {spot.place.short}" if spot.place else spot.operator


def _describe_gap(evidence: RankEvidence, lost_ns: float, spot: Spot) -> str:
    longer = milliseconds(evidence.mean_step_share(lost_ns) * evidence.budget.step_ms)
    limit = {"compute": "arithmetic", "memory": "memory bandwidth"}.get(spot.bound, "its work")
    reached = percent((spot.roof_ns or 0.0) / spot.device_ns)
    return f"{spot_words(evidence, spot)}, {reached} of the peak by {limit}: {longer} lost"


def _offer_for_spots(spots: list[Spot]) -> Iterator[Remedy]:
    """By what limits them."""
    if any(spot.bound == "memory" and spot.phase != "optimizer" for spot in spots):
        yield remedies.FUSE_NEIGHBOURS.offer()
    if any(spot.bound == "compute" and spot.dtype in ("fp32", "tf32") for spot in spots):
        yield remedies.BF16.offer()
    yield remedies.BATCH.offer("Use a larger batch: each kernel comes closer to the peak")


FEWEST_PARAMETERS = 20
# Operators on one tensor; `_foreach_` and `_fused_` operators take a list.
ONE_TENSOR = re.compile(r"^aten::(?!_foreach|_fused)")


@rule("Optimizer loops over parameters")
def optimizer_per_parameter(evidence: RankEvidence) -> Finding | None:
    """An optimizer that updates one parameter at a time. Kernels under `Optimizer.step#`
    launched by operators on one tensor."""
    if evidence.on_host:
        return None
    trace, launched = evidence.trace, evidence.launched
    step = in_optimizer_step(trace, trace.device.launch[launched.rows])
    inside = step >= 0
    single = inside & by_operator(trace, launched, ONE_TENSOR.match)
    steps = len(distinct(step[single]))
    parameters = _count_parameters(evidence, launched, single) / max(1, steps)
    if parameters < FEWEST_PARAMETERS or 2 * single.sum() < inside.sum():
        return None
    # From first start to last end of each optimizer step's kernels, summed.
    rows = launched.rows[step >= 0]
    start = evidence.trace.device.start_ns[rows]
    first, which, count = group(step[step >= 0])
    begins, ends = start[first].copy(), start[first].copy()
    np.minimum.at(begins, which, start)
    np.maximum.at(ends, which, start + launched.dur_ns[step >= 0])
    span_ns = int((ends - begins).sum()) if count else 0
    worked_ns = min(span_ns, int(launched.dur_ns[inside].sum()))
    share = min(1.0, evidence.device_share(worked_ns) + evidence.idle_share(span_ns - worked_ns))
    if share < LOW:
        return None
    kernels = int(inside.sum()) / steps
    return optimizer_per_parameter.finding(
        share=share,
        summary=f"The optimizer takes {percent(share)} of the step because it launches "
        f"{kernels:,.0f} kernels, one parameter at a time.",
        evidence=(
            f"from its first kernel to its last: {evidence.step_ms(share)}, with kernels running "
            f"for {milliseconds(evidence.device_share(worked_ns) * evidence.budget.step_ms)}",
            f"about {parameters:,.0f} parameters, {significant(kernels / parameters)} kernels each",
            f"a kernel runs {duration(float(launched.dur_ns[inside].mean()))} on average",
        ),
        where=costliest_places(trace, step[inside], launched.dur_ns[inside]),
        remedies=(
            remedies.FUSED_OPTIMIZER.offer(
                "Pass fused=True or foreach=True to the optimizer: one kernel then updates many "
                "parameters"
            ),
            remedies.CUDA_GRAPHS.offer(),
        ),
    )


def _count_parameters(evidence: RankEvidence, launched: Launched, single: Bools) -> int:
    """Number of parameters: the fewest calls among the frequent operators, as each parameter needs
    one call of each."""
    if not single.any():
        return 0
    host = evidence.trace.host
    calls = distinct(launched.operator[single])
    _, inverse, _ = group(host.name[calls])
    counts = np.bincount(inverse)
    return int(counts[2 * counts >= counts.max()].min())


@rule("Exposed copies")
def exposed_copies(evidence: RankEvidence) -> Finding | None:
    """Copies and memsets that run while nothing computes."""
    share = evidence.budget_share("exposed_memory")
    if share < LOW:
        return None
    worst = [copy for copy in evidence.copies if copy.exposed_ns][:3]
    return exposed_copies.finding(
        share=share,
        summary=f"The {evidence.device} only copies or clears memory for {percent(share)} of the "
        "step.",
        evidence=(
            f"exposed time: {evidence.budget_ms('exposed_memory')}",
            *(
                f"{copy.name}: {counted(copy.count, 'call')} in the whole trace"
                + (f", {rate(copy.gb_s * 1e9, 'B/s')}" if copy.gb_s is not None else "")
                for copy in worst
            ),
        ),
        remedies=(
            remedies.PIN_MEMORY.offer(
                "Set pin_memory=True in the DataLoader, and copy with non_blocking=True"
            ),
            remedies.PREFETCH.offer(),
        ),
    )
