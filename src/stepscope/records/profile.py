"""What a machine and its group of ranks can do at most, as `calibrate` measured it.

Rates are per second, times in nanoseconds; a ceiling that was not measured is absent, never zero.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from stepscope.records.limits import (  # noqa: TC001  (decoded at run time)
    Bytes,
    Cores,
    DurationNs,
    Ranks,
    Rate,
    Threads,
    UnixS,
)

PROFILE_SCHEMA = 1
_Ns = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Spread = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # a share of a time that may exceed it


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """time = alpha + beta x bytes, between two sizes."""

    from_bytes: Bytes
    to_bytes: Bytes
    alpha_ns: _Ns
    beta_ns_per_byte: _Ns

    def at(self, size_bytes: float) -> float:
        """The line's time in ns."""
        return self.alpha_ns + self.beta_ns_per_byte * size_bytes


_Line = Annotated[tuple[Segment, ...], msgspec.Meta(min_length=1)]


class MeasuredSize(msgspec.Struct, frozen=True, kw_only=True):
    """One size: the median over passes, and the lowest and highest pass."""

    size_bytes: Bytes
    time_ns: DurationNs
    low_ns: DurationNs
    high_ns: DurationNs


class CollectiveFit(msgspec.Struct, frozen=True, kw_only=True):
    """How long one kind of collective takes in groups of one size.

    Shares are of the time itself: 0.05 is 5%. `noise` is what passes disagree by at the same size,
    `held_out` how far a fit without a pass is from that pass, `held_out_sizes` the same where the
    fit had not seen the size either. All three are medians.
    """

    kind: str
    group: str  # world, intra-host, inter-host or pairs
    group_size: Ranks
    segments: _Line
    measured: tuple[MeasuredSize, ...]
    passes: Threads
    noise: _Spread
    held_out: _Spread
    held_out_sizes: _Spread

    def expected_ns(self, size_bytes: float) -> float:
        """Below the measured sizes the first segment holds, above them the last one."""
        for segment in self.segments:
            if size_bytes <= segment.to_bytes:
                return segment.at(size_bytes)
        return self.segments[-1].at(size_bytes)

    def band_ns(self, size_bytes: float) -> tuple[float, float]:
        """The expected time less and plus the typical error of an unseen pass."""
        expected, error = self.expected_ns(size_bytes), max(self.noise, self.held_out)
        return expected * (1 - min(error, 1.0)), expected * (1 + error)

    @property
    def latency_ns(self) -> float:
        """What a collective of no bytes would take."""
        return self.segments[0].alpha_ns


class Contention(msgspec.Struct, frozen=True, kw_only=True):
    """What an all-reduce and compute cost each other where they share processors."""

    group_size: Ranks
    lost: _Spread  # compute beside it loses this share of what the all-reduce takes alone
    beside: _Line  # how long the all-reduce lasts beside compute


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One calibration: the machine's ceilings and, with ranks, its collectives."""

    schema: int = PROFILE_SCHEMA
    host: str
    device: str
    kind: str  # cuda, rocm or cpu
    torch: str
    when_unix: UnixS
    world_size: Ranks
    backend: str | None
    threads: Threads
    matmul_flops: dict[str, Rate]  # dtype -> operations a second
    copy_bytes_s: Rate | None = None  # read plus written
    host_to_device_bytes_s: Rate | None = None  # pinned, bytes once
    device_to_host_bytes_s: Rate | None = None
    launch_ns: _Ns | None = None  # host's cost of an empty kernel
    launch_gap_ns: _Ns | None = None  # start to start of empty kernels already queued
    tiny_op_ns: _Ns | None = None  # host's cost of an operator on one element
    spread: dict[str, _Spread] = {}  # the middle half of the samples / median, by ceiling
    not_offered: dict[str, str] = {}  # dtype or "kind, group" -> the reason
    fits: tuple[CollectiveFit, ...] = ()
    contention: Contention | None = None  # of the world; not measured on an accelerator
    # Of a CPU: cores that other processes kept busy meanwhile, in the quietest of the rounds.
    other_cores: Cores | None = None
    cores: Cores | None = None
    rounds: Threads = 1  # as often everything was measured; the best counts

    def fit_for(self, kind: str, group_size: int, group: str | None = None) -> CollectiveFit | None:
        """The fit of exactly this group size, None where it was not measured.

        Where several groups have that size the first measured is meant unless `group` names one.
        """
        for fit in self.fits:
            if (fit.kind, fit.group_size) == (kind, group_size) and group in (None, fit.group):
                return fit
        return None
