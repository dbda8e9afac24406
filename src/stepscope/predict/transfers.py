"""How long collectives over so many ranks last: measured, carried over, or by a data sheet.

In this order: a fit of exactly that group size; the fit of another size, or what the trace's own
collectives took, carried over; the link of the device table. Each says which it is, and how far off
it may be. Bytes are carried over as a ring moves them, 2(p-1)/p times; latencies as a ring's for
gloo, 2(p-1), and as a tree's where the library picks the quicker one (NCCL, RCCL), 2 log2(p).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.records.profile import Contention, Segment
from stepscope.records.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from stepscope.records.devices import DeviceSpec
    from stepscope.records.profile import CollectiveFit, Profile
    from stepscope.records.trace import Trace

    Floats = NDArray[np.float64]

Basis = Literal["calibrated", "carried over", "trace", "data sheet"]
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
_TO_DEVIATION = 1.48  # a median error as a standard deviation
_LEAST_SPREAD = 0.08  # another day
_EACH_DOUBLING = 0.12  # of the group, of the logarithm
_OF_TRACE, _OF_DATA_SHEET = 0.25, 0.35
# Rings of a link reach this much of what its data sheet says for one direction.
_REACHED = 0.75
_LATENCY_NS, _ROUND_NS = 12_000.0, 6_000.0  # of one collective, and of each doubling of the ranks
_RINGS = ("gloo",)
_LARGE_BYTES = 256 * 1024  # takes 100 µs at 2.6 GB/s: bytes count on any link
_APART, _LONGER = 4.0, 1.2  # sizes, and the times of the smallest and the largest
_ONE_DOMAIN = 8  # GPUs that such links join; beyond, a network does
# Where processors are shared and nobody measured it (gloo, as many cores as ranks).
_USUAL = (0.7, 5_000_000.0, 2.0)  # share lost, latency beside compute, times as long


class TransferTimes(msgspec.Struct, frozen=True, kw_only=True):
    """latency x alpha + bytes x beta / bandwidth, by kind of collective."""

    ranks: int
    basis: Basis
    said: str
    spread: float  # of the logarithm of a time, one standard deviation
    lines: dict[str, tuple[Segment, ...]]
    contention: Contention | None = None  # None: compute and communication do not meet
    latency: float = 1.0
    bandwidth: float = 1.0

    def expected_ns(self, size_bytes: Floats, kind: str = "all_reduce") -> Floats:
        """One collective of each size, nothing else running."""
        return self._at(self.lines[kind], size_bytes)

    def beside_ns(self, size_bytes: Floats, kind: str = "all_reduce") -> Floats:
        """The same while compute runs."""
        alone = self.expected_ns(size_bytes, kind)
        if self.contention is None:
            return alone
        whole = self._at(self.lines["all_reduce"], size_bytes)
        slowed = self._at(self.contention.beside, size_bytes)
        return np.maximum(alone, slowed * alone / np.maximum(whole, 1.0))

    def scaled(self, factor: float) -> TransferTimes:
        """Every time, times this."""
        return replace(self, latency=self.latency * factor, bandwidth=self.bandwidth / factor)

    def _at(self, segments: Sequence[Segment], size_bytes: Floats) -> Floats:
        which = np.searchsorted([segment.to_bytes for segment in segments[:-1]], size_bytes)
        alpha = np.array([segment.alpha_ns for segment in segments])[which]
        beta = np.array([segment.beta_ns_per_byte for segment in segments])[which]
        found: Floats = alpha * self.latency + beta * size_bytes / self.bandwidth
        return found


class TracedAllReduces(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduces that a trace shows: how long each took, with what it waited for other ranks."""

    ranks: int
    size_bytes: Floats
    dur_ns: Floats


def find_transfer_times(
    ranks: int,
    *,
    trace: Trace,
    profiles: Iterable[Profile],
    seen: TracedAllReduces | None,
    device: DeviceSpec | None,
    on_host: bool,
) -> TransferTimes | None:
    """None where nobody knows."""
    fitting = [profile for profile in profiles if _is_of(profile, trace)]
    found = _by_profile(ranks, fitting)
    if found is None and seen is not None:
        found = by_trace(ranks, seen, "gloo" if on_host else trace.backend)
    if found is None and device is not None and not on_host:
        found = by_data_sheet(ranks, device)
    if found is not None and on_host and found.contention is None:
        found = replace(found, contention=_usual_contention(found.lines["all_reduce"], ranks))
        found = replace(
            found,
            said=f"{found.said}; how much it slows compute on shared cores is a typical value",
        )
    return found


def _is_of(profile: Profile, trace: Trace) -> bool:
    """Of such a device and backend, as far as both say."""
    device, backend = trace.device_name, trace.backend
    if profile.kind != trace.kind:
        return False
    if device and profile.device != device:
        return False
    return not (backend and profile.backend and backend != profile.backend)


# By calibration


def _by_profile(ranks: int, profiles: Sequence[Profile]) -> TransferTimes | None:
    """The same size, measured as the world; else measured as part of one; else carried over."""
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
    lines = {kind: _lines(profile, fit, kind, ranks) for kind in KINDS}
    spread = _spread_of(fit)
    where = f"{profile.backend} on {profile.host}"
    if fit.group_size == ranks:
        basis: Basis = "calibrated"
        said = f"all-reduces over {counted(ranks, 'rank')} as calibrated ({where})"
    else:
        basis = "carried over"
        spread = math.hypot(spread, _EACH_DOUBLING * abs(math.log2(ranks / fit.group_size)))
        said = (
            f"all-reduces over {counted(ranks, 'rank')} extrapolated from "
            f"{counted(fit.group_size, 'rank')} ({where}); "
            "links between hosts that were not measured are slower"
        )
    contention = profile.contention
    if contention and contention.group_size != ranks:
        beside = _carried(contention.beside, contention.group_size, ranks, profile.backend)
        contention = replace(contention, group_size=ranks, beside=beside)
    return TransferTimes(
        ranks=ranks, basis=basis, said=said, spread=spread, lines=lines, contention=contention
    )


def _spread_of(fit: CollectiveFit) -> float:
    """How far the lines are from the medians, and how well those are known: steps are medians too,
    so what single passes disagree by counts only as far as they do not average out."""
    off = [abs(fit.expected_ns(each.size_bytes) / each.time_ns - 1) for each in fit.measured]
    residual = float(np.median(off)) if off else fit.held_out
    error = _TO_DEVIATION * math.hypot(residual, fit.noise / math.sqrt(max(1, fit.passes)))
    return math.hypot(error, _LEAST_SPREAD)


def _lines(profile: Profile, fit: CollectiveFit, kind: str, ranks: int) -> tuple[Segment, ...]:
    """The kind's own fit of the same group; else half an all-reduce, as rings go."""
    own = profile.fit_for(kind, fit.group_size, fit.group)
    segments = own.segments if own else _times(fit.segments, 0.5, 0.5)
    return _carried(segments, fit.group_size, ranks, profile.backend)


def _carried(
    segments: Iterable[Segment], measured: int, ranks: int, backend: str | None
) -> tuple[Segment, ...]:
    hops = (ranks - 1) / (measured - 1)
    if backend not in _RINGS:
        hops = min(hops, math.log2(ranks) / math.log2(measured))
    volume = ((ranks - 1) / ranks) / ((measured - 1) / measured)
    return _times(segments, hops, volume)


def _times(segments: Iterable[Segment], alpha: float, beta: float) -> tuple[Segment, ...]:
    return tuple(
        replace(
            segment,
            alpha_ns=segment.alpha_ns * alpha,
            beta_ns_per_byte=segment.beta_ns_per_byte * beta,
        )
        for segment in segments
    )


def _usual_contention(lines: Iterable[Segment], ranks: int) -> Contention:
    lost, latency, longer = _USUAL
    beside = tuple(
        replace(
            line, alpha_ns=line.alpha_ns + latency, beta_ns_per_byte=longer * line.beta_ns_per_byte
        )
        for line in lines
    )
    return Contention(group_size=ranks, lost=lost, beside=beside)


# By what the trace shows


def by_trace(ranks: int, seen: TracedAllReduces, backend: str | None) -> TransferTimes | None:
    """The line under all of them: what lies above it was waiting for other ranks."""
    if seen.ranks < 2 or not len(seen.size_bytes) or not _tells_rate(seen):
        return None
    alpha, beta = lower_line(seen.size_bytes, seen.dur_ns)
    if backend not in _RINGS:  # what is more than any link's latency was waiting too
        alpha = min(alpha, 3 * _latency_ns(seen.ranks))
    line = Segment(
        from_bytes=int(seen.size_bytes.min()),
        to_bytes=int(seen.size_bytes.max()),
        alpha_ns=alpha,
        beta_ns_per_byte=beta,
    )
    whole = _carried((line,), seen.ranks, ranks, backend)
    spread = math.hypot(_OF_TRACE, _EACH_DOUBLING * abs(math.log2(ranks / seen.ranks)))
    rate = 1 / beta if beta else math.inf
    return TransferTimes(
        ranks=ranks,
        basis="trace",
        said=(
            f"all-reduces as fast as the fastest in the trace ({alpha / 1e3:.0f} µs + "
            f"{_rate_words(rate)} over {counted(seen.ranks, 'rank')})"
            + (f", extrapolated to {ranks}" if ranks != seen.ranks else "")
        ),
        spread=spread,
        lines={"all_reduce": whole, **_halves(whole)},
    )


def _tells_rate(seen: TracedAllReduces) -> bool:
    """Whether bytes decide how long they take: one large enough, or sizes apart whose times are.

    A few small messages tell a latency with waiting in it, and no bandwidth.
    """
    small, large = float(seen.size_bytes.min()), float(seen.size_bytes.max())
    if large >= _LARGE_BYTES:
        return True
    quick, slow = (float(seen.dur_ns[seen.size_bytes == size].min()) for size in (small, large))
    return large >= _APART * max(small, 1.0) and slow >= _LONGER * quick


def _rate_words(gb_s: float) -> str:
    return f"{gb_s:.1f} GB/s" if gb_s >= 1 else f"{gb_s * 1e3:.0f} MB/s"


def lower_line(size_bytes: Floats, dur_ns: Floats) -> tuple[float, float]:
    """Latency and ns a byte of the highest line under all points that is steep enough for most.

    The rate is that of the points which moved the most bytes a second; the latency is what is left
    at the quickest one.
    """
    beta = float(np.min(dur_ns / np.maximum(size_bytes, 1.0)))
    small, large = size_bytes.min(), size_bytes.max()
    if small < large:
        quickest, longest = (dur_ns[size_bytes == size].min() for size in (small, large))
        slope = float((longest - quickest) / (large - small))
        beta = min(beta, slope) if slope > 0 else beta
    alpha = float(np.min(dur_ns - beta * size_bytes))
    return max(alpha, 0.0), beta


def _halves(whole: tuple[Segment, ...]) -> dict[str, tuple[Segment, ...]]:
    return {kind: _times(whole, 0.5, 0.5) for kind in KINDS[1:]}


# By the data sheet


def _latency_ns(ranks: int) -> float:
    return _LATENCY_NS + 2 * math.log2(ranks) * _ROUND_NS


def by_data_sheet(ranks: int, device: DeviceSpec) -> TransferTimes | None:
    """A ring over the device's own link, one direction."""
    if not device.link_bytes_s:
        return None
    rate = _REACHED * device.link_bytes_s / 2
    line = Segment(
        from_bytes=0,
        to_bytes=1 << 40,
        alpha_ns=_latency_ns(ranks),
        beta_ns_per_byte=2 * (ranks - 1) / ranks / rate * 1e9,
    )
    beyond = max(0.0, math.log2(ranks / _ONE_DOMAIN))
    said = (
        f"nothing is calibrated: all-reduces by the data sheet of {device.name} ({device.link}, "
        f"{_REACHED:.0%} of {device.link_bytes_s / 2e9:.0f} GB/s one way), give or take half"
    )
    if beyond:
        said += f"; {ranks} workers need a network beyond that link, which is slower"
    return TransferTimes(
        ranks=ranks,
        basis="data sheet",
        said=said,
        spread=math.hypot(_OF_DATA_SHEET, 2 * _EACH_DOUBLING * beyond),
        lines={"all_reduce": (line,), **_halves((line,))},
    )
