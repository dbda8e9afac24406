"""What `calibrate --algorithms` found: what a step costs, and each algorithm against its formula.

Times are in nanoseconds; shares are of the vector that the collective is about.
"""

from __future__ import annotations

import msgspec

from stepscope.records.profile import MeasuredSize, Segment


class LinkModel(msgspec.Struct, frozen=True, kw_only=True):
    """What one step of a schedule costs, measured by probes and not by the algorithms.

    A line is alpha + beta x the bytes that the busiest rank sends or gets in the step.
    """

    start_ns: float  # a call, apart from its steps
    hop: tuple[Segment, ...]  # every rank sends to its neighbour
    pair: tuple[Segment, ...]  # two ranks exchange, the others rest
    inside: tuple[Segment, ...] | None = None  # neighbours on one host; None with one host
    gamma_ns_per_byte: float  # adding what came
    message_ns: float  # each further message that a rank sends in a step
    noise: float  # how far passes of `hop` differ

    @property
    def alpha_ns(self) -> float:
        return self.hop[0].alpha_ns

    @property
    def beta_ns_per_byte(self) -> float:
        return self.hop[-1].beta_ns_per_byte


class PredictedSize(MeasuredSize, frozen=True, kw_only=True):
    """One size as measured, and what the formula says; None for the backend's own algorithm."""

    predicted_ns: float | None


class AlgorithmTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One algorithm of one collective; the backend's own has no formula."""

    kind: str
    algorithm: str
    formula: str | None
    steps: int | None
    sent: float | None  # by the busiest rank, in multiples of the vector
    added: float | None
    sizes: tuple[PredictedSize, ...]
    error: float | None  # median of |predicted / measured - 1| over the sizes


class AlgorithmCrossover(msgspec.Struct, frozen=True, kw_only=True):
    """`below` is faster up to a size, `above` beyond it; None if the times never cross."""

    kind: str
    below: str
    above: str
    predicted_bytes: float
    measured_bytes: float | None


class LaboratoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, with where it was measured."""

    host: str
    device: str
    kind: str
    torch: str
    when_unix: float
    backend: str
    world_size: int
    hosts: tuple[tuple[int, ...], ...]  # ranks of each host
    groups: tuple[tuple[int, ...], ...]  # that hierarchical used
    checked: int  # comparisons with torch before the measurement
    link: LinkModel  # of the first collective; each has probes of its own
    algorithms: tuple[AlgorithmTimes, ...]
    crossovers: tuple[AlgorithmCrossover, ...]
