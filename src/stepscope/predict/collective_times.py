"""Predict how long a collective over N ranks takes: alpha-beta lines fitted to a calibration,
extrapolated, or from a data sheet or a trace. Also how all-reduce algorithms compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.errors import UsageError
from stepscope.predict.fitted import fitted
from stepscope.records.hardware import (
    CollectiveFit,
    Contention,
    DeviceSpec,
    MeasuredSize,
    Profile,
    Segment,
)
from stepscope.records.normal import median, medians
from stepscope.text.figures import duration, percent, rate
from stepscope.text.words import counted

if TYPE_CHECKING:
    from stepscope.records.trace import Trace
    from stepscope.step.graph import Floats

    _Span = tuple[int, int]
    _Lines = dict[_Span, tuple[float, float, float]]

# The sources, best first: a fit of exactly that group size; the fit of another size, or what the
# trace's own collectives took, extrapolated; the link in the device table. Each says which it is
# and how far off it may be. Bytes are extrapolated as a ring moves them, 2(p-1)/p times. Latencies
# are extrapolated as a ring's for gloo, 2(p-1), and as a tree's for NCCL and RCCL, which pick the
# faster algorithm, 2 log2(p).

Basis = Literal["calibrated", "carried over", "trace", "data sheet", "given"]
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
_TO_DEVIATION = 1.48  # a median error as a standard deviation
_SMALLEST_SPREAD = fitted("doubts.calibration")  # from one day to another
_SPREAD_PER_DOUBLING = fitted("doubts.per_doubling")  # of the group's size
_TRACE_SPREAD, _DATA_SHEET_SPREAD = fitted("doubts.traced_link"), fitted("doubts.data_sheet_link")
_REACHED = fitted("links.data_sheet_share")  # of the rate in one direction, by rings over a link
_LATENCY_NS = fitted("links.latency_ns")  # per collective
_ROUND_NS = fitted("links.round_ns")  # per doubling of the ranks
RINGS = ("gloo",)
_LARGE_BYTES = 256 * 1024  # 100 µs at 2.6 GB/s: on any link, bytes decide
_SIZE_RATIO, _TIME_RATIO = 4.0, 1.2  # of the largest message to the smallest, at least
_ONE_DOMAIN = 8  # GPUs joined by one kind of link; a network joins more
# If processors are shared and it was not measured (gloo, as many cores as ranks).
_USUAL_LOST = fitted("links.contention_lost")
_USUAL_LATENCY_NS = fitted("links.contention_latency_ns")
_USUAL_FACTOR = fitted("links.contention_factor")


class TransferTimes(msgspec.Struct, frozen=True, kw_only=True):
    """latency x alpha + bytes x beta / bandwidth, by kind of collective."""

    ranks: int
    basis: Basis
    source: str  # in words
    spread: float  # of the logarithm of a time, one standard deviation
    lines: dict[str, tuple[Segment, ...]]
    contention: Contention | None = None  # None: compute and communication do not slow each other
    latency: float = 1.0
    bandwidth: float = 1.0

    def expected_ns(self, size_bytes: Floats, kind: str = "all_reduce") -> Floats:
        """One collective of each size, with nothing else running."""
        return evaluate(self.lines[kind], size_bytes, self.latency, self.bandwidth)

    def contended_ns(self, size_bytes: Floats, kind: str = "all_reduce") -> Floats:
        """The same while compute runs."""
        alone = self.expected_ns(size_bytes, kind)
        if self.contention is None:
            return alone
        whole, slowed = (
            evaluate(lines, size_bytes, self.latency, self.bandwidth)
            for lines in (self.lines["all_reduce"], self.contention.beside)
        )
        return np.maximum(alone, slowed * alone / np.maximum(whole, 1.0))

    def scaled(self, factor: float) -> TransferTimes:
        return replace(self, latency=self.latency * factor, bandwidth=self.bandwidth / factor)


class TracedAllReduces(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduces that a trace shows; their times include waiting for other ranks."""

    ranks: int
    size_bytes: Floats
    dur_ns: Floats


def find_transfer_times(
    ranks: int,
    *,
    trace: Trace,
    profiles: Iterable[Profile],
    traced: TracedAllReduces | None,
    device: DeviceSpec | None,
    on_host: bool,
) -> TransferTimes | None:
    """None if no source knows."""
    times = from_profiles(ranks, [profile for profile in profiles if fits_trace(profile, trace)])
    if times is None and traced is not None:
        times = from_trace(ranks, traced, "gloo" if on_host else trace.backend)
    if times is None and device is not None and not on_host:
        times = from_data_sheet(ranks, device)
    return with_usual_contention(times) if times is not None and on_host else times


def with_usual_contention(times: TransferTimes) -> TransferTimes:
    """For processors that compute and communicate, unless contention was measured."""
    if times.contention is not None:
        return times
    slowed = tuple(
        replace(line, alpha_ns=line.alpha_ns + _USUAL_LATENCY_NS)
        for line in _scale_lines(times.lines["all_reduce"], 1.0, _USUAL_FACTOR)
    )
    return replace(
        times,
        contention=Contention(group_size=times.ranks, lost=_USUAL_LOST, beside=slowed),
        source=f"{times.source}. How much it slows compute on shared cores is a typical value",
    )


def fits_trace(profile: Profile, trace: Trace) -> bool:
    """Whether device and backend are the trace's, as far as both are known."""
    device, backend = trace.device_name, trace.backend
    if profile.kind != trace.kind or (device and profile.device != device):
        return False
    return not (backend and profile.backend and backend != profile.backend)


# From calibration


def from_profiles(ranks: int, profiles: Sequence[Profile]) -> TransferTimes | None:
    """A fit of this group size, best of the whole world; else the nearest size, extrapolated."""
    choices = [
        (profile, fit)
        for profile in profiles
        for fit in profile.fits
        if fit.kind == "all_reduce" and fit.group_size > 1
    ]
    if not choices:
        return None

    def distance(choice: tuple[Profile, CollectiveFit]) -> tuple[float, bool, float]:
        profile, fit = choice
        return abs(math.log(fit.group_size / ranks)), fit.group != "world", -profile.when_unix

    profile, fit = min(choices, key=distance)
    lines = {}
    for kind in KINDS:  # its own fit of the same group; else half an all-reduce, as in a ring
        own = profile.fit_for(kind, fit.group_size, fit.group)
        segments = own.segments if own else _scale_lines(fit.segments, 0.5, 0.5)
        lines[kind] = _extrapolate(segments, fit.group_size, ranks, profile.backend)
    # How far the lines are from the medians, and how well those are known. Steps are medians too,
    # so differences between passes count only as far as they do not average out.
    errors = [abs(fit.expected_ns(one.size_bytes) / one.time_ns - 1) for one in fit.measured]
    residual = median(errors) if errors else fit.held_out
    noise = fit.noise / math.sqrt(max(1, fit.passes))
    spread = math.hypot(_TO_DEVIATION * math.hypot(residual, noise), _SMALLEST_SPREAD)
    where = f"{profile.backend} on {profile.host}"
    if fit.group_size == ranks:
        basis: Basis = "calibrated"
        source = f"all-reduces over {counted(ranks, 'rank')} as calibrated ({where})"
    else:
        basis = "carried over"
        spread = math.hypot(spread, _SPREAD_PER_DOUBLING * abs(math.log2(ranks / fit.group_size)))
        source = (
            f"all-reduces over {counted(ranks, 'rank')} extrapolated from "
            f"{counted(fit.group_size, 'rank')} ({where}). Links between hosts that were not "
            "measured are slower"
        )
    contention = profile.contention
    if contention and contention.group_size != ranks:
        slowed = _extrapolate(contention.beside, contention.group_size, ranks, profile.backend)
        contention = replace(contention, group_size=ranks, beside=slowed)
    return TransferTimes(
        ranks=ranks, basis=basis, source=source, spread=spread, lines=lines, contention=contention
    )


def _extrapolate(
    segments: Iterable[Segment], measured: int, ranks: int, backend: str | None
) -> tuple[Segment, ...]:
    hops = (ranks - 1) / (measured - 1)
    if backend not in RINGS:
        hops = min(hops, math.log2(ranks) / math.log2(measured))
    volume = ((ranks - 1) / ranks) / ((measured - 1) / measured)
    return _scale_lines(segments, hops, volume)


def _scale_lines(segments: Iterable[Segment], alpha: float, beta: float) -> tuple[Segment, ...]:
    """alpha and beta times these factors."""
    return tuple(
        replace(line, alpha_ns=line.alpha_ns * alpha, beta_ns_per_byte=line.beta_ns_per_byte * beta)
        for line in segments
    )


# From the trace's own collectives


def from_trace(ranks: int, traced: TracedAllReduces, backend: str | None) -> TransferTimes | None:
    """The line under all of them: anything above it was waiting for other ranks."""
    sizes, times = traced.size_bytes, traced.dur_ns
    if traced.ranks < 2 or not len(sizes):
        return None
    # Bytes must decide the times: a few small messages show a latency with waiting in it, and no
    # bandwidth.
    small, large = float(sizes.min()), float(sizes.max())
    short_ns, long_ns = (float(times[sizes == size].min()) for size in (small, large))
    differ = large >= _SIZE_RATIO * max(small, 1.0) and long_ns >= _TIME_RATIO * short_ns
    if large < _LARGE_BYTES and not differ:
        return None
    alpha, beta = lower_line(traced.size_bytes, traced.dur_ns)
    if backend not in RINGS:  # more than any link's latency was waiting too
        alpha = min(alpha, 3 * _latency_ns(traced.ranks))
    line = Segment(
        from_bytes=int(traced.size_bytes.min()),
        to_bytes=int(traced.size_bytes.max()),
        alpha_ns=alpha,
        beta_ns_per_byte=beta,
    )
    whole = _extrapolate((line,), traced.ranks, ranks, backend)
    spread = math.hypot(_TRACE_SPREAD, _SPREAD_PER_DOUBLING * abs(math.log2(ranks / traced.ranks)))
    bandwidth = rate(1e9 / beta, "B/s") if beta else "no time per byte"
    return TransferTimes(
        ranks=ranks,
        basis="trace",
        source=(
            f"all-reduces are as fast as the fastest in the trace ({duration(alpha)} + "
            f"{bandwidth} over {counted(traced.ranks, 'rank')})"
            + (f", extrapolated to {ranks}" if ranks != traced.ranks else "")
        ),
        spread=spread,
        lines={"all_reduce": whole, **halves(whole)},
    )


def lower_line(size_bytes: Floats, dur_ns: Floats) -> tuple[float, float]:
    """Latency and ns per byte of a line under all points.

    Its slope is that of the fastest point, or flatter if the smallest and the largest message say
    so. The latency is what is then left at the nearest point.
    """
    beta = float(np.min(dur_ns / np.maximum(size_bytes, 1.0)))
    small, large = size_bytes.min(), size_bytes.max()
    if small < large:
        short_ns, long_ns = (dur_ns[size_bytes == size].min() for size in (small, large))
        slope = float((long_ns - short_ns) / (large - small))
        beta = min(beta, slope) if slope > 0 else beta
    alpha = float(np.min(dur_ns - beta * size_bytes))
    return max(alpha, 0.0), beta


def halves(whole: tuple[Segment, ...]) -> dict[str, tuple[Segment, ...]]:
    return {kind: _scale_lines(whole, 0.5, 0.5) for kind in KINDS[1:]}


# From the data sheet


def _latency_ns(ranks: int) -> float:
    return _LATENCY_NS + 2 * math.log2(ranks) * _ROUND_NS


def from_data_sheet(ranks: int, device: DeviceSpec) -> TransferTimes | None:
    """A ring over one direction of the device's own link."""
    if not device.link_bytes_s:
        return None
    one_way = device.link_bytes_s / 2
    line = Segment(
        from_bytes=0,
        to_bytes=1 << 40,
        alpha_ns=_latency_ns(ranks),
        beta_ns_per_byte=2 * (ranks - 1) / ranks / (_REACHED * one_way) * 1e9,
    )
    beyond = max(0.0, math.log2(ranks / _ONE_DOMAIN))
    source = (
        f"nothing is calibrated. All-reduces follow the data sheet of {device.name} "
        f"({device.link}, {percent(_REACHED)} of {rate(one_way, 'B/s')} one way), which may "
        "be wrong by half"
    )
    if beyond:
        source += f". {ranks} workers need a network beyond that link, which is slower"
    return TransferTimes(
        ranks=ranks,
        basis="data sheet",
        source=source,
        spread=math.hypot(_DATA_SHEET_SPREAD, 2 * _SPREAD_PER_DOUBLING * beyond),
        lines={"all_reduce": (line,), **halves((line,))},
    )


# How long a collective takes as a function of its bytes: lines fitted by relative error.
#
# The largest sizes rule a plain least-squares line: its latency comes out negative, and small
# messages are off by whole multiples. Here errors are relative, so every size counts the same;
# latencies cannot be negative; and one to three lines cover the sizes, as many as predict held-out
# passes best. The lines are the measured total, without an algorithm's factors.

MAX_SEGMENTS = 3
_MIN_SIZES = 3  # per segment: a line through two points proves nothing
_SMALLEST_GAIN = 0.1  # one more segment must lower the held-out error by this share
_NEGLIGIBLE = 1e-4  # of the time
_REWEIGHTINGS = 8


def fit_sweep(
    *,
    kind: str,
    group: str,
    group_size: int,
    sizes_bytes: Sequence[int],
    passes_ns: Sequence[Sequence[Sequence[float]]],
) -> CollectiveFit:
    """Times are by pass, by size, by call. Needs two sizes and two passes."""
    sizes = np.asarray(sizes_bytes, dtype=np.float64)
    pass_medians = np.array([[median(calls) for calls in one] for one in passes_ns])
    by_pass = held_out_errors(sizes, pass_medians)
    by_size = held_out_errors(sizes, pass_medians, sizes_too=True)
    # As few segments as possible, unless more are clearly better on what they have not seen.
    count = 1
    for more in range(2, len(by_size) + 1):
        if by_size[more - 1] < by_size[count - 1] * (1 - _SMALLEST_GAIN) - _NEGLIGIBLE:
            count = more
    times = medians(pass_medians)
    return CollectiveFit(
        kind=kind,
        group=group,
        group_size=group_size,
        segments=fit_segments(sizes, times, count),
        measured=tuple(
            MeasuredSize(
                size_bytes=int(size),
                time_ns=round(median(column)),
                low_ns=round(float(column.min())),
                high_ns=round(float(column.max())),
            )
            for size, column in zip(sizes, pass_medians.T, strict=True)
        ),
        passes=len(pass_medians),
        noise=noise_floor(pass_medians),
        held_out=by_pass[count - 1],
        held_out_sizes=by_size[count - 1],
    )


def fit_contention(group_size: int, sizes: Sequence[Mapping[str, float]]) -> Contention | None:
    """From the times of an all-reduce and of compute, each alone and while the other runs.

    The share that compute loses is that of all sizes together: one small size is mostly noise.
    """
    if not sizes:
        return None
    columns = {
        name: np.array([size[f"{name}_ns"] for size in sizes], np.float64)
        for name in ("alone", "compute", "slowed", "lasts")
    }
    lost = float((columns["slowed"] - columns["compute"]).sum() / columns["alone"].sum())
    size_bytes = np.array([size["size_bytes"] for size in sizes], np.float64)
    lasts = np.maximum(columns["lasts"], columns["alone"])
    return Contention(
        group_size=group_size,
        lost=min(max(lost, 0.0), 1.5),
        beside=fit_segments(size_bytes, lasts, 1),
    )


def noise_floor(pass_medians: Floats) -> float:
    """The median relative distance of a pass from the other passes' median at the same size.

    No model can be expected to do better on a pass that it has not seen.
    """
    errors = [np.abs(medians(others) - one) / one for one, others in _hold_out(pass_medians)]
    return median(errors)


def held_out_errors(sizes: Floats, pass_medians: Floats, *, sizes_too: bool = False) -> list[float]:
    """The median relative error on a pass the fit has not seen, with one segment, two, ...

    With `sizes_too` the fit has not seen the size either, except the smallest and the largest.
    """
    counts = range(1, max(1, min(MAX_SEGMENTS, len(sizes) // _MIN_SIZES)) + 1)
    by_count: list[list[Floats]] = [[] for _ in counts]
    for one, others in _hold_out(pass_medians):
        known = medians(others)
        predicted = _predictions(sizes, known, counts)
        if sizes_too:
            for place in range(1, len(sizes) - 1):
                rest = np.arange(len(sizes)) != place
                unseen = _predictions(sizes[rest], known[rest], counts, sizes[place : place + 1])
                predicted[:, place] = unseen[:, 0]
        for row, errors in zip(np.abs(predicted - one) / one, by_count, strict=True):
            errors.append(row)
    return [median(errors) for errors in by_count]


def fit_segments(sizes: Floats, times: Floats, count: int) -> tuple[Segment, ...]:
    """The best `count` lines by the sum of relative errors; fewer if there are too few sizes."""
    return _partition(sizes, _fit_all_lines(sizes, times), count)


def evaluate(
    segments: Sequence[Segment], sizes: Floats, latency: float = 1.0, bandwidth: float = 1.0
) -> Floats:
    """latency x alpha + bytes x beta / bandwidth, by the line that covers each size."""
    which = np.searchsorted([segment.to_bytes for segment in segments[:-1]], sizes)
    alpha = np.array([segment.alpha_ns for segment in segments])[which]
    beta = np.array([segment.beta_ns_per_byte for segment in segments])[which]
    times: Floats = alpha * latency + beta * sizes / bandwidth
    return times


def _predictions(
    sizes: Floats, times: Floats, counts: range, asked: Floats | None = None
) -> Floats:
    """One row per number of segments."""
    lines = _fit_all_lines(sizes, times)
    asked = sizes if asked is None else asked
    return np.array([evaluate(_partition(sizes, lines, count), asked) for count in counts])


def _partition(sizes: Floats, lines: _Lines, count: int) -> tuple[Segment, ...]:
    """The cheapest way to cover all sizes with `count` of the lines."""
    count = max(1, min(count, len(sizes) // _MIN_SIZES))
    best: dict[tuple[int, int], tuple[float, list[_Span]]] = {(0, 0): (0.0, [])}
    for used in range(1, count + 1):
        for (start, end), (_, _, cost) in lines.items():
            total, before = best.get((used - 1, start), (np.inf, []))
            if total + cost < best.get((used, end), (np.inf, []))[0]:
                best[used, end] = (total + cost, [*before, (start, end)])
    spans = best[count, len(sizes)][1]
    # From the smallest size to the largest; two segments meet at the geometric mean.
    inner = [round(float(np.sqrt(sizes[end - 1] * sizes[end]))) for _, end in spans[:-1]]
    edges = [int(sizes[0]), *inner, int(sizes[-1])]
    return tuple(
        Segment(
            from_bytes=low, to_bytes=high, alpha_ns=lines[span][0], beta_ns_per_byte=lines[span][1]
        )
        for (low, high), span in zip(pairwise(edges), spans, strict=True)
    )


def _fit_all_lines(sizes: Floats, times: Floats) -> _Lines:
    """alpha, beta and the sum of relative errors of the line through every run of sizes.

    All runs at once, one row each; reweighting brings the sum of errors near its minimum.
    """
    count = len(sizes)
    spans = [  # the first size of a segment, and the one after its last
        (start, end)
        for start in range(count)
        for end in range(start + 1, count + 1)
        if end - start >= _MIN_SIZES or (start, end) == (0, count)
    ]
    place = np.arange(len(sizes))
    inside = np.array([(start <= place) & (place < end) for start, end in spans])
    base = inside / times**2
    weights = base
    for _ in range(_REWEIGHTINGS):
        alpha, beta = _least_squares(sizes, times, weights)
        errors = np.abs(alpha[:, None] + beta[:, None] * sizes - times) / times
        weights = base / np.maximum(errors, 1e-4)
    cost = (errors * inside).sum(axis=1)
    rows = zip(alpha.tolist(), beta.tolist(), cost.tolist(), strict=True)
    return dict(zip(spans, rows, strict=True))


def _least_squares(sizes: Floats, times: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """One line per row of weights; a number that would be negative is zero."""
    total = weights.sum(axis=1)
    centre, level = weights @ sizes / total, weights @ times / total
    offset = sizes - centre[:, None]
    square = (weights * offset**2).sum(axis=1)
    beta = np.divide((weights * offset) @ times, square, out=np.zeros_like(total), where=square > 0)
    beta = np.maximum(beta, 0.0)
    alpha = level - beta * centre
    through_zero = (weights @ (sizes * times)) / (weights @ sizes**2)
    below = alpha < 0
    return np.where(below, 0.0, alpha), np.where(below, through_zero, beta)


def _hold_out(pass_medians: Floats) -> list[tuple[Floats, Floats]]:
    """Each pass, with all the others."""
    return [(pass_medians[i], np.delete(pass_medians, i, axis=0)) for i in range(len(pass_medians))]


# Which all-reduce algorithm is fastest: ring, tree or halving-doubling, by their alpha-beta costs.
#
# With p ranks, n bytes, alpha per hop and beta per byte of one link (docs/records/collectives.md):
#
#     ring              2 (p-1) alpha      +  2 (p-1)/p n beta
#     tree              2 log2(p) alpha    +  2 n beta             (pipelined)
#     halving-doubling  2 log2(p) alpha    +  2 (p-1)/p n beta
#
# Reduce-scatter and all-gather are each half of the ring's. collective_laboratory.py has every
# algorithm that can be measured; the pipelined tree is NCCL's, and only compared.
#
# Over h hosts with r ranks on each, p = r h, and hops inside a host and between hosts:
#
#     ring          2 (p-1) max(alpha)  +  2 (p-1)/p n max(beta)
#     hierarchical  2 (r-1) alpha_in + 2 (r-1)/r n beta_in
#                   + 2 (h-1) alpha_out + 2 (h-1)/h n beta_out
#
# A ring is as slow as its slowest hop. A hierarchical all-reduce scatters inside the host, reduces
# between hosts (all r ranks at once, over the host's one link) and gathers inside the host.

ALGORITHMS = ("ring", "tree", "halving_doubling")
_TIE = 1e-9


class Crossover(msgspec.Struct, frozen=True, kw_only=True):
    """`below` is faster up to this size, `above` beyond it."""

    below: str
    above: str
    size_bytes: float


class AlgorithmComparison(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int
    ranks: int
    alpha_ns: float
    beta_ns_per_byte: float
    times_ns: dict[str, float]
    fastest: tuple[str, ...]  # several if they tie
    crossovers: tuple[Crossover, ...]
    reduce_scatter_ns: float
    all_gather_ns: float


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """One message between neighbours: alpha + beta x bytes."""

    alpha_ns: float
    beta_ns_per_byte: float


def compare_algorithms(
    size_bytes: int, ranks: int, alpha_ns: float, beta_ns_per_byte: float
) -> AlgorithmComparison:
    """Each algorithm's time, the fastest, and the sizes at which two of them trade places."""
    if ranks < 2:
        raise UsageError(f"a collective needs at least 2 ranks, not {ranks}")
    if size_bytes < 0 or alpha_ns < 0 or beta_ns_per_byte < 0:
        raise UsageError("sizes, alpha and beta cannot be negative")
    times = {
        name: hops * alpha_ns + volume * size_bytes * beta_ns_per_byte
        for name, (hops, volume) in _hops_and_volumes(ranks).items()
    }
    least = min(times.values())
    # Sizes at which fewer hops stop making up for more bytes; smallest first.
    terms = _hops_and_volumes(ranks)
    crossovers = []
    for one, other in combinations(ALGORITHMS, 2):
        below, above = sorted((one, other), key=lambda name: terms[name][0])
        hops = (terms[above][0] - terms[below][0]) * alpha_ns
        volume = (terms[below][1] - terms[above][1]) * beta_ns_per_byte
        if hops > 0 and volume > 0:
            crossovers.append(Crossover(below=below, above=above, size_bytes=hops / volume))
    return AlgorithmComparison(
        size_bytes=size_bytes,
        ranks=ranks,
        alpha_ns=alpha_ns,
        beta_ns_per_byte=beta_ns_per_byte,
        times_ns=times,
        fastest=tuple(name for name, ns in times.items() if ns <= least * (1 + _TIE)),
        crossovers=tuple(sorted(crossovers, key=lambda crossover: crossover.size_bytes)),
        reduce_scatter_ns=times["ring"] / 2,
        all_gather_ns=times["ring"] / 2,
    )


def hop_of_line(segments: Sequence[Segment], ranks: int) -> Hop:
    """alpha and beta of one hop, if these lines are a ring's over so many ranks.

    The latency is the first segment's, the rate the last one's.
    """
    hops, volume = _hops_and_volumes(ranks)["ring"]
    return Hop(
        alpha_ns=segments[0].alpha_ns / hops,
        beta_ns_per_byte=segments[-1].beta_ns_per_byte / volume,
    )


def ring_over_hosts(
    hosts: int, per_host: int, inside: Hop | None, between: Hop, *, tree_latency: bool = False
) -> Segment:
    """An all-reduce over all ranks in one ring, which the slowest hop decides.

    Hops inside a host that are not known are taken to be no slower than those between hosts. With
    `tree_latency` a message climbs a tree inside the host and one between the hosts, as small
    messages do under NCCL.
    """
    ranks = hosts * per_host
    hops, volume = _hops_and_volumes(ranks)["ring"]
    slow = [between, *([inside] if inside and per_host > 1 else [])]
    alpha = hops * max(hop.alpha_ns for hop in slow)
    if tree_latency:
        near = inside.alpha_ns if inside else between.alpha_ns
        alpha = 2 * (math.log2(per_host) * near + math.log2(hosts) * between.alpha_ns)
    return _all_sizes(alpha, volume * max(hop.beta_ns_per_byte for hop in slow))


def hierarchical_over_hosts(hosts: int, per_host: int, inside: Hop, between: Hop) -> Segment:
    """An all-reduce in three parts: inside hosts, between them, inside them again."""
    parts = [(per_host, inside), (hosts, between)]
    rings = [(*_hops_and_volumes(ranks)["ring"], hop) for ranks, hop in parts if ranks > 1]
    return _all_sizes(
        sum(hops * hop.alpha_ns for hops, _, hop in rings),
        sum(volume * hop.beta_ns_per_byte for _, volume, hop in rings),
    )


def _all_sizes(alpha_ns: float, beta_ns_per_byte: float) -> Segment:
    return Segment(
        from_bytes=0, to_bytes=1 << 40, alpha_ns=alpha_ns, beta_ns_per_byte=beta_ns_per_byte
    )


def _hops_and_volumes(ranks: int) -> dict[str, tuple[float, float]]:
    """Alphas, and multiples of all bytes, that each algorithm costs."""
    levels, volume = 2 * math.log2(ranks), 2 * ((ranks - 1) / ranks)
    return {
        "ring": (2.0 * (ranks - 1), volume),
        "tree": (levels, 2.0),
        "halving_doubling": (levels, volume),
    }
