"""How much of the device's peak a step uses: MFU, HFU, dtypes, tensor cores, and the roofline of
its operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from stepscope.explain.compiled.graph_calls import KernelPieces
from stepscope.explain.compiled.graph_kernels import KernelFacts, OpenedRegions, open_regions
from stepscope.explain.flops.call import (
    FP32,
    MATMUL_LIKE,
    PREFIX,
    TF32,
    Call,
    KernelName,
    graph_key,
    is_plain_fp32,
    read_name,
)
from stepscope.explain.flops.costs import Costs, Pieces
from stepscope.explain.flops.products import CAUSAL
from stepscope.records.dtypes import PEAKS
from stepscope.records.explanation import StepTime
from stepscope.records.hardware import (
    Bound,
    Ceilings,
    DtypeUse,
    Efficiency,
    Phase,
    Spot,
    above_peak,
)
from stepscope.records.quality import Note
from stepscope.records.source_lines import Place
from stepscope.records.trace import ABSENT, HostKind, Trace
from stepscope.step.arrays import Bools, Floats, Indices, Int64s
from stepscope.step.call_tree import group, sum_by
from stepscope.step.cuda_graphs import has_graphs
from stepscope.step.phases import PHASES
from stepscope.step.work import named, rows_named
from stepscope.text import figures
from stepscope.text.figures import percent
from stepscope.trace.links import distinct, is_among, nearest_of

if TYPE_CHECKING:
    from stepscope.explain.rank_analysis import RankAnalysis

# MFU is model FLOPs / (step x devices x peak); HFU also counts what was computed twice. The step is
# the step of record: measured without the profiler if possible. Only matrix products count.

_HALF = ("fp16", "bf16", "fp8", "fp4")
_WORTH_SAYING = 0.01


def measure_efficiency(analysis: RankAnalysis, step_ms: StepTime) -> Efficiency | None:
    """None if no compute was recorded."""
    trace, work, costs = analysis.trace, analysis.work, analysis.costs
    chosen, pieces, ceilings = analysis.steady_steps, analysis.pieces, analysis.ceilings
    if not pieces.compute.any():
        return None
    rows = np.flatnonzero(costs.counted & costs.launched)
    rows = rows[chosen.holds(trace.host.start_ns[rows])]
    hardware, model = (
        round((int(column[rows].sum()) + _sum_replayed(costs, pieces, column)) / chosen.count)
        for column in (costs.flops, costs.model_flops)
    )
    uses = _by_dtype(trace, costs, pieces, rows, ceilings, on_host=work.on_host)
    dtype = max(uses, key=lambda use: use.flops).dtype if uses else None
    peak = ceilings.flops.get(dtype) if ceilings and dtype else None
    step = step_ms.truth or step_ms.corrected or step_ms.profiled or None
    possible = peak * pieces.devices * step / 1e3 if peak and step and hardware else None
    unknown = _unknown_share(trace, costs, pieces, on_host=work.on_host)
    total = sum(use.device_ns for use in uses)
    # The optimizer's operators with the line that calls it, where there is one for all.
    spots = open_spots(analysis, list_spots(trace, costs, pieces, ceilings))
    places = {line.place for line in analysis.inputs.optimizer_lines}
    if len(places) != 1:
        with_line_of_step: tuple[Spot, ...] = spots
    else:
        (place,) = places
        with_line_of_step = tuple(
            replace(spot, place=place) if spot.phase == "optimizer" and not spot.place else spot
            for spot in spots
        )
    return Efficiency(
        mfu=model / possible if possible else None,
        hfu=hardware / possible if possible else None,
        model_flops=model,
        hardware_flops=hardware,
        recomputed_flops=hardware - model,
        peak_flops=peak,
        peak_source=ceilings.flops_source[dtype] if ceilings and dtype and peak else None,
        dtype=dtype,
        unknown_share=unknown,
        tensor_core_share=sum(use.tensor_core_ns for use in uses) / total
        if total and not work.on_host
        else None,
        step_ms=step,
        devices=pieces.devices,
        by_dtype=uses,
        ceilings=ceilings,
        spots=with_line_of_step,
        notes=tuple(_notes(analysis, rows, unknown)),
    )


def _sum_replayed(costs: Costs, pieces: Pieces, flops: Int64s) -> int:
    """FLOPs of the products that CUDA graphs replay."""
    joined = np.flatnonzero(pieces.replayed)
    joined = joined[costs.counted[pieces.operator[joined]]]
    return round(float((flops[pieces.operator[joined]] * pieces.call_part[joined]).sum()))


def about_peaks(efficiency: Efficiency) -> Iterator[Note]:
    """What is, or may be, wrong with the peaks."""
    if words := above_peak(efficiency):
        yield Note(id="above-peak", detail=words)
    if efficiency.ceilings and efficiency.ceilings.doubt:
        yield Note(id="busy-calibration", detail=efficiency.ceilings.doubt)


def _by_dtype(
    trace: Trace,
    costs: Costs,
    pieces: Pieces,
    rows: Indices,
    ceilings: Ceilings | None,
    *,
    on_host: bool,
) -> tuple[DtypeUse, ...]:
    """Products by the dtype they were computed in, most FLOPs first."""
    flops, total, on_tensor = (np.zeros(len(PEAKS) + 1, np.int64) for _ in range(3))
    np.add.at(flops, costs.dtype[rows], costs.flops[rows])  # -1 is the last place
    products = np.flatnonzero((pieces.operator >= 0) & pieces.compute)
    products = products[costs.counted[pieces.operator[products]]]
    dtype = costs.dtype[pieces.operator[products]].copy()
    replayed = pieces.replayed[products]
    # A graph's launch and a compiled region stand for many products, with the dtype of most.
    fp32 = _in_fp32(trace, costs, pieces, products)
    of_regions = distinct(pieces.operator[products[fp32 & ~replayed]])
    of_regions = of_regions[is_among(of_regions, rows)]
    np.subtract.at(flops, costs.dtype[of_regions], costs.in_fp32[of_regions])
    flops[FP32] += costs.in_fp32[of_regions].sum()
    dtype[fp32] = FP32
    again = products[replayed]
    amount = costs.flops[pieces.operator[again]] * pieces.call_part[again]
    np.add.at(flops, dtype[replayed], np.rint(amount).astype(np.int64))
    if not on_host:
        helps = _of_kernels(trace, pieces, products, lambda kernel: kernel.harmless)
        products, dtype = products[~helps], dtype[~helps]
        half = np.isin(dtype, [PEAKS.index(name) for name in _HALF])
        tensor = _of_kernels(trace, pieces, products, lambda kernel: kernel.cores == "tensor")
        unknown = _of_kernels(trace, pieces, products, lambda kernel: kernel.cores == "unknown")
        tensor |= half & unknown
        np.add.at(on_tensor, dtype[tensor], pieces.dur_ns[products[tensor]])
    np.add.at(total, dtype, pieces.dur_ns[products])
    uses = [
        DtypeUse(
            dtype=name,
            flops=round(int(flops[code]) / pieces.steps),
            device_ns=round(int(total[code]) / pieces.steps),
            tensor_core_ns=round(int(on_tensor[code]) / pieces.steps),
            peak_flops=ceilings.flops.get(name) if ceilings else None,
        )
        for code, name in enumerate(PEAKS)
        if flops[code] or total[code]
    ]
    return tuple(sorted(uses, key=lambda use: -use.flops))


def _in_fp32(trace: Trace, costs: Costs, pieces: Pieces, products: Indices) -> Bools:
    """Pieces whose kernels say that they multiply in fp32, though most around them do not."""
    operator = pieces.operator[products]
    several = pieces.replayed[products] | (costs.in_fp32[operator] > 0)
    fp32 = several & _of_kernels(trace, pieces, products, is_plain_fp32)
    as_tf32 = _of_kernels(trace, pieces, products, lambda kernel: kernel.dtype == "tf32")
    found: Bools = fp32 & ~(as_tf32 & several).any()  # else some of its FLOPs are in tf32
    return found


def _unknown_share(trace: Trace, costs: Costs, pieces: Pieces, *, on_host: bool) -> float:
    """Share of compute time in kernels that may multiply matrices, with unknown FLOPs.

    The operator of such a kernel is matmul-like without shapes, or not PyTorch's, or not recorded,
    and the kernel's name does not show that it multiplies nothing.
    """
    total = int(pieces.dur_ns[pieces.compute].sum())
    chosen = np.flatnonzero(pieces.compute)
    row = pieces.operator[chosen]
    known = row >= 0
    known[known] = costs.flops[row[known]] >= 0
    if not on_host:
        # Host rows that are PyTorch's own operators.
        host = trace.host
        operator = host.kind == HostKind.OPERATOR
        known[known] = (
            costs.answering
            | rows_named(trace, host, operator, lambda name: name.startswith("aten::"))
        )[row[known]]
        known |= _of_kernels(trace, pieces, chosen, lambda kernel: kernel.harmless)
    return int(pieces.dur_ns[chosen[~known]].sum()) / total if total else 0.0


def _of_kernels(
    trace: Trace, pieces: Pieces, chosen: Indices, matches: Callable[[KernelName], bool]
) -> Bools:
    """Which of the chosen pieces have a kernel whose name matches."""
    among = np.ones(len(chosen), np.bool_)
    return named(trace, pieces.name[chosen], among, lambda name: matches(read_name(name)))


def _notes(analysis: RankAnalysis, rows: Indices, unknown: float) -> Iterator[str]:
    """What was assumed, in sentences."""
    trace, costs, pieces = analysis.trace, analysis.costs, analysis.pieces
    chosen = analysis.steady_steps
    if not chosen.steps.steps:
        yield "no steps in the trace: the figures are of the whole window"
    if unknown >= _WORTH_SAYING:
        yield (
            f"{percent(unknown)} of compute time is in kernels whose FLOPs the trace does not give"
            f"{_why_unknown(analysis)}: the FLOPs counted are a lower bound"
        )
    written = _share_named(trace, pieces, PREFIX)
    if written >= _WORTH_SAYING:
        yield (
            f"{percent(written)} of compute time is in kernels that torch.compile wrote. Those "
            "with matmuls count as unknown, and the FLOPs of the others are not counted"
        )
    again = int((costs.flops - costs.model_flops)[rows][~costs.recomputed[rows]].sum())
    if again > 0:
        yield (
            f"fused attention recomputes its scores in backward: "
            f"{figures.flops(again / chosen.count)} per step that HFU counts and MFU does not"
        )
    yield from _causal(costs, rows)


def _why_unknown(analysis: RankAnalysis) -> str:
    if has_graphs(analysis.trace):
        if analysis.recordings:
            return " (kernels of a CUDA graph that fit no captured graph)"
        return " (kernels of a CUDA graph whose recording is not in it)"
    products = [call for call in analysis.costs.calls if call.name in MATMUL_LIKE]
    if products and not any(len(call) for call in products):
        return " (shapes were not recorded: profile with record_shapes=True)"
    return ""


def _share_named(trace: Trace, pieces: Pieces, prefix: str) -> float:
    chosen = named(trace, pieces.name, pieces.compute, lambda name: name.startswith(prefix))
    return float(pieces.dur_ns[chosen].sum() / max(1, pieces.dur_ns[pieces.compute].sum()))


def _causal(costs: Costs, rows: Indices) -> list[str]:
    """Attention is counted in full: with a causal mask half of it would do."""
    numbers = set(costs.signature[rows].tolist()) - {-1}
    calls = [costs.calls[number] for number in numbers if costs.calls[number].name in CAUSAL]
    causal = [_is_causal(call) for call in calls]
    if any(causal):
        return ["attention is counted in full, though a causal mask needs about half of it"]
    if None in causal:
        return ["whether attention is causal was not recorded, so it is counted in full"]
    return []


def _is_causal(call: Call) -> bool | None:
    place = CAUSAL[call.name]
    return call.text(place) not in ("False", "0") if call.has_value(place) else None


# Compiled graphs on the roofline: one row for each of their kernels' operators and source lines.
#
# A trace of a CUDA graph shows one launch for all kernels of a compiled graph, so all that is known
# of them there is the graph as a whole. Its code, which capture recorded, tells them apart.

_NEGLIGIBLE = 1e-6  # of a graph's time
_MOST_NAMES = 3


class _KernelRow(NamedTuple):
    """What is one row of the table."""

    graph: int  # into the opened graphs
    operator: str
    place: Place | None
    dtype: str
    phase: Phase


class _KernelSums(NamedTuple):
    """Over the steady steps; None: of one of the kernels it is not known."""

    calls: int
    ns: int
    flops: int | None
    moved: int | None

    def plus(self, ns: int, calls: int, fact: KernelFacts) -> _KernelSums:
        return _KernelSums(
            self.calls + calls,
            self.ns + ns,
            _plus(self.flops, fact.flops, calls),
            _plus(self.moved, fact.size_bytes, calls),
        )


def open_spots(analysis: RankAnalysis, spots: tuple[Spot, ...]) -> tuple[Spot, ...]:
    """The same spots, those of compiled graphs by kernel; what is of none stays with the graph."""
    whole = [spot for spot in spots if graph_key(spot.operator)]
    if not whole:
        return spots
    opened = analysis.compute_once(open_regions)
    rows, steps = _sum_kernels(analysis, opened), analysis.steady_steps.count
    kernels = [
        place_on_roofline(
            analysis.ceilings,
            Spot(
                operator=row.operator,
                dtype=row.dtype,
                calls=sums.calls / steps,
                device_ns=sums.ns / steps,
                flops=None if sums.flops is None else sums.flops / steps,
                bytes_moved=None if sums.moved is None else sums.moved / steps,
                phase=row.phase,
                place=row.place,
            ),
        )
        for row, sums in rows.items()
    ]
    others = [spot for spot in spots if not graph_key(spot.operator)]
    left = (_left_of(analysis, opened, spot, rows) for spot in whole)
    return widest_first([*others, *kernels, *(spot for spot in left if spot is not None)])


def _sum_kernels(analysis: RankAnalysis, opened: OpenedRegions) -> dict[_KernelRow, _KernelSums]:
    """Of kernels that no operator of the trace answers for."""
    pieces, host = opened.pieces, analysis.trace.host
    steady = analysis.steady_steps.holds(host.start_ns[pieces.region])
    mine = np.flatnonzero(steady & (pieces.kernel != ABSENT) & _belong_to_graph(analysis, pieces))
    columns = (pieces.graph[mine], pieces.kernel[mine], analysis.costs.phase[pieces.region[mine]])
    first, place, count = group(*columns)
    total = sum_by(place, pieces.dur_ns[mine], count)
    once, _, _ = group(place, pieces.region[mine])  # a call may launch several kernels
    runs = np.bincount(place[once], minlength=count)
    rows: dict[_KernelRow, _KernelSums] = {}
    for number, sample in enumerate(mine[first].tolist()):
        graph, region = int(pieces.graph[sample]), int(pieces.region[sample])
        fact = opened.facts[graph][int(pieces.kernel[sample])]
        # In which its products are computed: the kernels' names say whether fp32 is
        # tf32.
        if not fact.flops or fact.dtype < 0:
            dtype = ""
        else:
            dtype = PEAKS[
                TF32
                if fact.dtype == FP32 and int(analysis.costs.dtype[region]) == TF32
                else fact.dtype
            ]
        # The operators of one kernel, the costliest first.
        if not fact.operators:
            operator = fact.name
        else:
            names = " + ".join(fact.operators[:_MOST_NAMES])
            operator = f"{names} + ..." if len(fact.operators) > _MOST_NAMES else names
        row = _KernelRow(
            graph=graph,
            operator=operator,
            place=fact.lines[0][0] if fact.lines else None,
            dtype=dtype,
            phase=phase_of(analysis.costs, region),
        )
        before = rows.get(row, _KernelSums(0, 0, 0, 0))
        rows[row] = before.plus(int(total[number]), int(runs[number]), fact)
    return rows


def _belong_to_graph(analysis: RankAnalysis, pieces: KernelPieces) -> Bools:
    """Whether the graph, and no operator inside it, answers for a piece in `list_spots`."""
    costs = analysis.costs
    if analysis.work.on_host:
        row = nearest_of(analysis.trace.host, costs.answering, np.maximum(pieces.event, 0))
        row[pieces.event == ABSENT] = pieces.region[pieces.event == ABSENT]
    else:
        row = costs.operator[pieces.event]
    mine: Bools = row == pieces.region
    return mine


def _left_of(
    analysis: RankAnalysis, opened: OpenedRegions, spot: Spot, rows: dict[_KernelRow, _KernelSums]
) -> Spot | None:
    """What a graph's kernels do not explain of it; all of it where its code was not captured."""
    keys = [graph.key for graph in opened.pieces.graphs]
    key, steps = graph_key(spot.operator), analysis.steady_steps.count
    mine = [
        sums for row, sums in rows.items() if keys[row.graph] == key and row.phase == spot.phase
    ]
    left_ns = spot.device_ns - sum(sums.ns for sums in mine) / steps
    if left_ns <= _NEGLIGIBLE * spot.device_ns:
        return None
    found = sum(sums.flops or 0 for sums in mine) / steps
    graph = opened.pieces.graphs[keys.index(key)] if key in keys else None
    left = Spot(
        operator=f"compiled graph {graph.region}" if graph and graph.region else "compiled graph",
        dtype=spot.dtype,
        calls=spot.calls,
        device_ns=left_ns,
        flops=None if spot.flops is None else max(0.0, spot.flops - found),
        bytes_moved=None,
        phase=spot.phase,
    )
    return place_on_roofline(analysis.ceilings, left)


def _plus(sum_before: int | None, amount: int | None, calls: int) -> int | None:
    return None if sum_before is None or amount is None else sum_before + amount * calls


# The roofline: the least time that each operator's arithmetic and bytes need, and its gap to it.

# The roof of a call is the longer of FLOPs / peak and bytes / bandwidth, with every byte counted
# once. A gap may be negative: data that stays in a cache is not read from memory again.


def list_spots(
    trace: Trace, costs: Costs, pieces: Pieces, ceilings: Ceilings | None
) -> tuple[Spot, ...]:
    """One row per operator, shapes, dtype and phase with device time; the widest gap first."""
    host = trace.host
    worked = pieces.operator >= 0
    first, place, count = group(pieces.operator[worked])
    if not count:
        return ()
    rows = pieces.operator[worked][first]
    time = sum_by(place, pieces.dur_ns[worked], count)
    # Of each operator: one of its own if it launched something, and those that graphs
    # replay.
    replayed = pieces.replayed[worked]
    own = np.bincount(place[~replayed], minlength=count) > 0
    again = np.bincount(
        place, weights=np.where(replayed, pieces.call_part[worked], 0.0), minlength=count
    )
    weight: Floats = own.astype(np.float64) + again
    signature = costs.signature[rows]
    what = np.where(signature >= 0, signature, len(costs.calls) + host.name[rows])
    first, inverse, count = group(
        what, costs.dtype[rows], costs.phase[rows], costs.recomputed[rows]
    )
    calls = np.bincount(inverse, weights=weight, minlength=count) / pieces.steps
    sample = rows[first]
    outer = (costs.flops[rows] > 0) & ~costs.counted[rows]  # its FLOPs are those inside it
    columns = zip(
        sample.tolist(),
        calls.tolist(),
        (sum_by(inverse, time, count) / pieces.steps).tolist(),
        _amounts(np.where(outer, 0, costs.flops[rows]), weight, inverse, count, pieces.steps),
        _amounts(
            np.where(outer, -1, costs.bytes_moved[rows]), weight, inverse, count, pieces.steps
        ),
        strict=True,
    )
    spots = []
    for row, times, device_ns, flops, moved in columns:
        shapes, dtype = host.shapes[row], int(costs.dtype[row])
        spot = Spot(
            operator=trace.strings[host.name[row]],
            shapes=" ".join(trace.strings[shapes].split()) if shapes >= 0 else "",
            dtype=PEAKS[dtype] if dtype >= 0 else "",
            calls=times,
            device_ns=device_ns,
            flops=flops,
            bytes_moved=moved,
            phase=phase_of(costs, row),
            recomputed=bool(costs.recomputed[row]),
        )
        spots.append(place_on_roofline(ceilings, spot))
    return widest_first(spots)


def widest_first(spots: list[Spot]) -> tuple[Spot, ...]:
    """By the gap; those without one last, the longest first."""
    return tuple(
        sorted(
            spots, key=lambda spot: (spot.gap_ns is None, -(spot.gap_ns or 0.0), -spot.device_ns)
        )
    )


def _amounts(
    amount: Int64s, weight: Floats, inverse: Indices, count: int, steps: int
) -> list[float | None]:
    """Sums per step; None where the amount of one of the calls is unknown."""
    known = np.maximum(amount, 0) * weight
    total = np.bincount(inverse, weights=known, minlength=count) / steps
    unknown = np.bincount(inverse, weights=amount < 0, minlength=count) > 0
    return [None if gap else value for value, gap in zip(total.tolist(), unknown, strict=True)]


def phase_of(costs: Costs, row: int) -> Phase:
    return PHASES[costs.phase[row]]  # type: ignore[return-value]


def place_on_roofline(ceilings: Ceilings | None, spot: Spot) -> Spot:
    """The amounts of one step against what the device could do at best."""
    peak = ceilings.flops.get(spot.dtype) if ceilings else None
    bytes_s = ceilings.bytes_s if ceilings else None
    flops, moved, device_ns = spot.flops, spot.bytes_moved, spot.device_ns
    by_flops = flops / peak * 1e9 if flops and peak else None
    by_bytes = moved / bytes_s * 1e9 if moved and bytes_s else None
    # The longer time; None if the FLOPs are unknown, or if there are some but no known peak.
    if flops is None or (flops and by_flops is None):
        roof = None
    else:
        roof = max((time for time in (by_flops, by_bytes) if time is not None), default=None)
    if flops == 0:
        bound: Bound = "memory" if by_bytes is not None else "unknown"
    elif flops is None or by_flops is None:
        bound = "unknown"
    else:
        bound = "memory" if by_bytes is not None and by_bytes > by_flops else "compute"
    return replace(
        spot,
        intensity=flops / moved if flops and moved else None,
        achieved_flops=flops / device_ns * 1e9 if flops and device_ns else None,
        ceiling_flops=flops / roof * 1e9 if flops and roof else None,
        roof_ns=roof,
        gap_ns=device_ns - roof if roof is not None else None,
        bound=bound,
    )
