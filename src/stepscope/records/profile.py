"""The ceilings of a machine and its group of ranks, as `calibrate` measured them.

Rates are per second, times in nanoseconds; a ceiling that was not measured is absent, never zero.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from stepscope.records.limits import Bytes, Cores, DurationNs, Ranks, Rate, Threads, UnixS  # noqa: TC001  (decoded)

PROFILE_SCHEMA = 1
_Ns = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Spread = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # a share of a time; may exceed 1


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """time = alpha + beta x bytes, between two sizes."""

    from_bytes: Bytes
    to_bytes: Bytes
    alpha_ns: _Ns
    beta_ns_per_byte: _Ns

    def at(self, size_bytes: float) -> float:
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

    Errors are shares of the time: 0.05 is 5%. `noise` is how far passes differ at the same size,
    `held_out` how far a fit without a pass is from that pass, `held_out_sizes` how far one without
    that size is. All three are medians.
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
        """Uses the first segment below the measured sizes and the last one above them."""
        for segment in self.segments:
            if size_bytes <= segment.to_bytes:
                return segment.at(size_bytes)
        return self.segments[-1].at(size_bytes)

    @property
    def latency_ns(self) -> float:
        """The time of a collective of no bytes."""
        return self.segments[0].alpha_ns


class Contention(msgspec.Struct, frozen=True, kw_only=True):
    """What an all-reduce and compute cost each other on shared processors."""

    group_size: Ranks
    lost: _Spread  # compute during it loses this share of the time the all-reduce takes alone
    beside: _Line  # how long the all-reduce takes while compute runs


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
    matmul_flops: dict[str, Rate]  # dtype -> FLOP/s
    sustained_flops: dict[str, Rate] = {}  # the same without rests, of a GPU
    copy_bytes_s: Rate | None = None  # read plus written
    host_to_device_bytes_s: Rate | None = None  # pinned, bytes once
    device_to_host_bytes_s: Rate | None = None
    launch_ns: _Ns | None = None  # the host's cost of an empty kernel
    launch_gap_ns: _Ns | None = None  # start to start of empty kernels already queued
    tiny_op_ns: _Ns | None = None  # the host's cost of an operator on one element
    spread: dict[str, _Spread] = {}  # interquartile range / median, by ceiling
    not_offered: dict[str, str] = {}  # dtype or "kind, group" -> the reason
    fits: tuple[CollectiveFit, ...] = ()
    contention: Contention | None = None  # of the world; not measured on an accelerator
    # On a CPU: the cores that other processes kept busy, in the quietest round.
    other_cores: Cores | None = None
    cores: Cores | None = None
    rounds: Threads = 1  # repetitions of all measurements; the best counts
    hosts: Ranks | None = None  # on which the ranks were; None if not noted

    def fit_for(self, kind: str, group_size: int, group: str | None = None) -> CollectiveFit | None:
        """The fit for exactly this group size, None if it was not measured.

        If several groups have that size, the first measured one, unless `group` names another.
        """
        for fit in self.fits:
            if (fit.kind, fit.group_size) == (kind, group_size) and group in (None, fit.group):
                return fit
        return None
