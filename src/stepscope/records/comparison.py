"""The results of `compare` and `ab`: how far B's step is from A's, how sure, and what changed."""

from __future__ import annotations

from typing import Literal

import msgspec

from stepscope.records.prediction import StepBasis, TrackedPromise, Workload
from stepscope.records.run import RunRemedy
from stepscope.text.figures import milliseconds, signed, signed_percent, significant, size
from stepscope.text.notebook import SEVERITY_COLOURS, Length, MarkedLine, card, line

_CARD_LINES = 4  # of a list in a notebook
Verdict = Literal["faster", "slower", "no difference seen"]
# measured: without the profiler. profiled: steps of a trace. listed: from a list of step times.
StepsAre = Literal["measured", "profiled", "listed"]


class RunSteps(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    steps: int  # used
    warm_up: int  # steps left out at the beginning
    median_ms: float
    mean_ms: float
    effective_steps: float  # independent steps with the same information
    trail_ms: tuple[float, ...] = ()  # in order: medians of equal stretches of the used steps
    rank: int | None = None  # whose steps they are, in a job of several
    drift: float | None = None  # second half / first half - 1, if significant


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """A or B."""

    ms: float  # the geometric mean of the runs' mean steps, or of their medians: see the basis
    low_ms: float
    high_ms: float
    runs: tuple[RunSteps, ...]
    quantiles_ms: tuple[float, ...]  # of all used steps: 0%, 1%, ... 100%
    remedies: tuple[RunRemedy, ...] = ()  # that its last run was started with


class MedianStep(msgspec.Struct, frozen=True, kw_only=True):
    """A second opinion: the median step, which no stall moves, or the step as it was recorded."""

    a_ms: float
    b_ms: float
    change: float
    low: float
    high: float
    verdict: Verdict


class SlowSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The 95th percentile: one step in twenty is longer."""

    a_ms: float
    b_ms: float
    change: float
    low: float
    high: float


class PhaseChange(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of the training loop, on the host: medians over steps. Or what stalls of one cause
    add to the mean step."""

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
    """A kernel or operator: its time per step before and after; None if it did not run."""

    name: str
    a_ms: float | None
    b_ms: float | None
    change_ms: float
    a_calls: float | None  # per step
    b_calls: float | None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A fact about the runs that differs between the sides."""

    name: str
    a: str | None
    b: str | None


class ComparedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that are known on both sides, and those that changed from A to B."""

    looked_at: tuple[str, ...] = ()
    changed: tuple[Difference, ...] = ()


class OpenPromise(msgspec.Struct, frozen=True, kw_only=True):
    """A promise about A that this comparison does not check."""

    id: str
    words: str
    why: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """B against A. Changes are relative to A: -0.1 is 10% less.

    `a_ms` and `b_ms` are steps without the profiler: measured, or those of the traces with its
    overhead subtracted, where `profiled` has them as recorded. Else they are as recorded.
    """

    a_ms: float
    b_ms: float
    change: float
    low: float
    high: float
    confidence: float
    verdict: Verdict
    smallest_detectable: float
    steps_low: float  # the interval from these runs' steps alone, as if starts never differed
    steps_high: float
    between_starts: float | None  # assumed standard deviation between starts; None: not assumed
    steps_are: StepsAre
    paired: bool  # runs alternated and are compared pair by pair
    a: Side
    b: Side
    basis: StepBasis = "median"
    median: MedianStep | None = None  # next to means
    profiled: MedianStep | None = None  # as recorded, where the profiler's overhead is subtracted
    slow_steps: SlowSteps | None = None
    phases: tuple[PhaseChange, ...] = ()
    stalls: tuple[PhaseChange, ...] = ()  # stall_<cause>, the largest change first
    # The changes of phases and stalls and this one add up to b_ms - a_ms.
    rest: PhaseChange | None = None
    budget: tuple[PartChange, ...] = ()
    kernels: tuple[NameChange, ...] = ()
    operators: tuple[NameChange, ...] = ()
    a_peak_bytes: int | None = None
    b_peak_bytes: int | None = None
    config: tuple[Difference, ...] = ()
    workload: Workload = Workload()  # A's
    evidence: ComparedFacts = ComparedFacts()
    promise: TrackedPromise | None = None  # the promise that this comparison checks
    open_promises: tuple[OpenPromise, ...] = ()  # about A, not checked
    notes: tuple[str, ...] = ()

    @property
    def is_as_recorded(self) -> bool:
        """Whether the steps compared contain the profiler's overhead."""
        return self.steps_are == "profiled" and self.profiled is None

    @property
    def runs(self) -> int:
        """The runs of the side that has fewer."""
        return min(len(self.a.runs), len(self.b.runs))

    def __repr__(self) -> str:
        return line("Comparison", f"B against A: {self.verdict}", self._steps())

    def _repr_html_(self) -> str:
        changes = [
            f"{one.name}: {one.a or 'not set'} -> {one.b or 'not set'}" for one in self.config
        ]
        rows = (
            ("typical", self._typical()),
            ("what moved", self._moved()),
            ("memory", self._memory()),
            ("differs", "; ".join(changes[:_CARD_LINES])),
            ("notes", "; ".join(self.notes)),
        )
        sides = [
            Length(name, side.ms, milliseconds(side.ms), side.low_ms, side.high_ms)
            for name, side in (("A", self.a), ("B", self.b))
        ]
        return card(f"B against A: {self.verdict}", rows, aside=self._steps(), lengths=sides)

    def _typical(self) -> str:
        """The median step, which may decide where stalls make the mean unsure."""
        if self.median is None:
            return ""
        median = self.median
        return _change_words(median.a_ms, median.b_ms, median.change, median.low, median.high)

    def _moved(self) -> list[MarkedLine]:
        """The phases, stalls or parts whose time changed most."""
        moved: tuple[PhaseChange | PartChange, ...] = self.phases + self.stalls or self.budget
        largest = sorted(moved, key=lambda one: -abs(one.change_ms))[:_CARD_LINES]
        colours = SEVERITY_COLOURS["none"], SEVERITY_COLOURS["high"]
        return [
            MarkedLine(
                colours[one.change_ms > 0],
                f"{signed(one.change_ms)} ms",
                f"{one.id.replace('_', ' ')}: {significant(one.a_ms)} -> {milliseconds(one.b_ms)}",
            )
            for one in largest
            if one.change_ms
        ]

    def _memory(self) -> str:
        if self.a_peak_bytes is None or self.b_peak_bytes is None:
            return ""
        return f"{size(self.a_peak_bytes)} -> {size(self.b_peak_bytes)} at the peak"

    def _steps(self) -> str:
        return _change_words(self.a_ms, self.b_ms, self.change, self.low, self.high)


def _change_words(a_ms: float, b_ms: float, change: float, low: float, high: float) -> str:
    steps = f"{significant(a_ms)} -> {milliseconds(b_ms)} a step"
    return f"{steps}, {signed_percent(change)} ({signed_percent(low)} to {signed_percent(high)})"
