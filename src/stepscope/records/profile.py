"""What a machine and its group of ranks can do at most, as `calibrate` measured it.

Rates are per second, times in nanoseconds; a ceiling that was not measured is absent, never zero.
"""

from __future__ import annotations

import msgspec

PROFILE_SCHEMA = 1


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """time = alpha + beta x bytes, between two sizes."""

    from_bytes: int
    to_bytes: int
    alpha_ns: float
    beta_ns_per_byte: float

    def at(self, size_bytes: float) -> float:
        """The line's time in ns."""
        return self.alpha_ns + self.beta_ns_per_byte * size_bytes


class MeasuredSize(msgspec.Struct, frozen=True, kw_only=True):
    """One size: the median over passes, and the lowest and highest pass."""

    size_bytes: int
    time_ns: int
    low_ns: int
    high_ns: int


class CollectiveFit(msgspec.Struct, frozen=True, kw_only=True):
    """How long one kind of collective takes in groups of one size.

    Shares are of the time itself: 0.05 is 5%. `noise` is what passes disagree by at the same size,
    `held_out` how far a fit without a pass is from that pass, `held_out_sizes` the same where the
    fit had not seen the size either. All three are medians.
    """

    kind: str
    group: str  # world, intra-host, inter-host or pairs
    group_size: int
    segments: tuple[Segment, ...]
    measured: tuple[MeasuredSize, ...]
    passes: int
    noise: float
    held_out: float
    held_out_sizes: float

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

    group_size: int
    lost: float  # compute beside it loses this share of what the all-reduce takes alone
    beside: tuple[Segment, ...]  # how long the all-reduce lasts beside compute


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One calibration: the machine's ceilings and, with ranks, its collectives."""

    schema: int = PROFILE_SCHEMA
    host: str
    device: str
    kind: str  # cuda, rocm or cpu
    torch: str
    when_unix: float
    world_size: int
    backend: str | None
    threads: int
    matmul_flops: dict[str, float]  # dtype -> operations a second
    copy_bytes_s: float | None = None  # read plus written
    host_to_device_bytes_s: float | None = None  # pinned, bytes once
    device_to_host_bytes_s: float | None = None
    launch_ns: float | None = None  # host's cost of an empty kernel
    launch_gap_ns: float | None = None  # start to start of empty kernels already queued
    tiny_op_ns: float | None = None  # host's cost of an operator on one element
    spread: dict[str, float] = {}  # the middle half of the samples / median, by ceiling
    not_offered: dict[str, str] = {}  # dtype or "kind, group" -> the reason
    fits: tuple[CollectiveFit, ...] = ()
    contention: Contention | None = None  # of the world; not measured on an accelerator
    # Of a CPU: cores that other processes kept busy meanwhile, in the quietest of the rounds.
    other_cores: float | None = None
    cores: float | None = None
    rounds: int = 1  # as often everything was measured; the best counts

    def fit_for(self, kind: str, group_size: int, group: str | None = None) -> CollectiveFit | None:
        """The fit of exactly this group size, None where it was not measured.

        Where several groups have that size the first measured is meant unless `group` names one.
        """
        for fit in self.fits:
            if (fit.kind, fit.group_size) == (kind, group_size) and group in (None, fit.group):
                return fit
        return None
