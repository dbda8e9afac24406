"""What a probe of a step's operators found."""

from __future__ import annotations

import msgspec

OUT_OF_TIME = "the budget was over before its turn"


class ProbedOperator(msgspec.Struct, frozen=True, kw_only=True):
    """One distinct call of the step, per step."""

    name: str
    shapes: str
    count: int
    traced_ms: float  # both passes, in the trace's precision
    probed_ms: float | None  # the same by the probe; None: not timed
    modes_ms: dict[str, float]  # by the other precisions asked for
    spread: float | None  # half of the 95% interval of `probed_ms`, relative


class UnprobedOperator(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    shapes: str
    mode: str
    share: float  # of the traced operators' time
    why: str


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    place: str  # where it was timed
    traced_place: str | None  # where the trace ran
    software: str
    modes: tuple[str, ...]
    operators: tuple[ProbedOperator, ...]  # longest first
    unprobed: tuple[UnprobedOperator, ...]  # most expensive first
    traced_ms: float  # everything that the step's device runs
    probed_share: float  # of `traced_ms`: timed in all modes
    # The timed calls in the trace's own precision: what the trace and what the probe says.
    same_traced_ms: float
    same_probed_ms: float
    # By precision: what autocast adds to the host's time of a step; not there if not measured.
    host_added_ms: dict[str, float] = {}
    budget_s: float
    wall_s: float
    saved: int  # times written to the library
    notes: tuple[str, ...] = ()

    @property
    def difference(self) -> float | None:
        """The probe's sum over the trace's, minus one."""
        return self.same_probed_ms / self.same_traced_ms - 1 if self.same_traced_ms else None
