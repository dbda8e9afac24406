"""What `compare` and `ab` say: how far B's step is from A's, how sure that is, and what moved."""

from __future__ import annotations

from typing import Literal

import msgspec

from stepscope.records.notebook import card, line
from stepscope.records.promise import TrackedPromise, Workload

Verdict = Literal["faster", "slower", "no difference seen"]
# measured: without the profiler. profiled: steps of a trace. listed: from somebody's list.
StepsAre = Literal["measured", "profiled", "listed"]


class RunSteps(msgspec.Struct, frozen=True, kw_only=True):
    """One run's part in a comparison."""

    path: str
    steps: int  # that count
    warm_up: int  # left out at the beginning
    median_ms: float
    effective_steps: float  # independent steps that would say as much
    trail_ms: tuple[float, ...] = ()  # in order: medians of equal stretches of the steps that count
    rank: int | None = None  # whose steps they are, in a job of several
    drift: float | None = None  # second half over first, less one, where that is no chance


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """A or B."""

    ms: float  # of several runs the geometric mean of their medians
    low_ms: float
    high_ms: float
    runs: tuple[RunSteps, ...]
    quantiles_ms: tuple[float, ...]  # of all steps that count: 0%, 1%, ... 100%


class SlowSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The 95th percentile of steps: one step in twenty is longer."""

    a_ms: float
    b_ms: float
    change: float
    low: float
    high: float


class PhaseChange(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of the training loop, on the host: medians over steps."""

    id: str
    a_ms: float
    b_ms: float
    change_ms: float
    low_ms: float
    high_ms: float


class PartChange(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the budget, in milliseconds of the step."""

    id: str
    a_ms: float
    b_ms: float
    change_ms: float


class NameChange(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel or an operator: its time in a step before and after; None where it was not there."""

    name: str
    a_ms: float | None
    b_ms: float | None
    change_ms: float
    a_calls: float | None  # in a step
    b_calls: float | None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A fact about the runs that is not the same on both sides."""

    name: str
    a: str | None
    b: str | None


class ComparedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at on both sides, and what of it changed from A to B."""

    looked_at: tuple[str, ...] = ()
    changed: tuple[Difference, ...] = ()


class OpenPromise(msgspec.Struct, frozen=True, kw_only=True):
    """A promise about A that this comparison does not answer."""

    id: str
    words: str
    why: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """B against A. Changes are shares of A: -0.1 is a tenth less."""

    a_ms: float
    b_ms: float
    change: float
    low: float
    high: float
    confidence: float
    verdict: Verdict
    smallest_detectable: float
    steps_low: float  # the interval from these runs' steps alone, without what starts differ
    steps_high: float
    between_starts: float | None  # assumed standard deviation of a start; None: not assumed
    steps_are: StepsAre
    paired: bool  # runs took turns and are compared pair by pair
    a: Side
    b: Side
    slow_steps: SlowSteps | None = None
    phases: tuple[PhaseChange, ...] = ()
    rest: PhaseChange | None = None  # phases' changes and this one add up to b_ms - a_ms
    budget: tuple[PartChange, ...] = ()
    kernels: tuple[NameChange, ...] = ()
    operators: tuple[NameChange, ...] = ()
    a_peak_bytes: int | None = None
    b_peak_bytes: int | None = None
    config: tuple[Difference, ...] = ()
    workload: Workload = Workload()  # A's
    evidence: ComparedFacts = ComparedFacts()
    promise: TrackedPromise | None = None  # the one that this comparison answers
    open_promises: tuple[OpenPromise, ...] = ()  # about A, not answered
    notes: tuple[str, ...] = ()

    @property
    def a_low_ms(self) -> float:
        return self.a.low_ms

    @property
    def a_high_ms(self) -> float:
        return self.a.high_ms

    @property
    def runs(self) -> int:
        """Of the side that has fewer."""
        return min(len(self.a.runs), len(self.b.runs))

    def __repr__(self) -> str:
        return line("Comparison", f"B against A: {self.verdict}", self._steps())

    def _repr_html_(self) -> str:
        return card([("verdict", f"B against A: {self.verdict}"), ("step", self._steps())])

    def _steps(self) -> str:
        interval = f"{self.low:+.1%} to {self.high:+.1%}"
        return f"{self.a_ms:.2f} -> {self.b_ms:.2f} ms a step, {self.change:+.1%} ({interval})"
