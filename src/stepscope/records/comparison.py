"""The results of `compare`, `ab` and `tune`: how far B's step is from A's, how sure, what changed,
and what each trial of a tune gained.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from stepscope.records.prediction import StepBasis, TrackedPromise, Workload
from stepscope.records.run import RunRemedy
from stepscope.text.figures import interval, milliseconds, signed, signed_percent, significant, size
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


# What `stepscope tune` found, as tune.json holds it, and what one remedy gained when it was tried.
#
# Field names are the words of the JSON contract (docs/reference/json.md, `tune --json`). Steps are
# in milliseconds; null means not known.

# Parity of what crashed or trains otherwise, and of what nobody could look at.
FAILED, NOT_KNOWN = "failed", "not known"


KEPT = "the kept changes"


class TriedConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """One row of tune.json's trials: some remedies, applied together."""

    remedies: tuple[str, ...] = ()
    predicted_ms: float | None = None
    predicted_low_ms: float | None = None
    predicted_high_ms: float | None = None
    measured_ms: float | None = None  # None where it failed before its steps were measured
    low_ms: float | None = None
    high_ms: float | None = None
    peak_bytes: int | None = None
    parity: str = ""
    parity_detail: str = ""
    kept: bool = False
    why: str = ""
    runs: tuple[str, ...] = ()  # folders of its trials, below the tune folder

    @property
    def name(self) -> str:
        return " + ".join(self.remedies)


class RemedyLeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A remedy that was not tried, and why."""

    remedy: str = ""
    why: str = ""


class TuneResult(msgspec.Struct, frozen=True, kw_only=True):
    """tune.json. Every part may be missing: a tune that was stopped early knows less."""

    schema: int = 1
    command: tuple[str, ...] = ()
    folder: str | None = None  # the working folder of the command
    status: str = ""
    baseline_ms: float | None = None
    baseline_low_ms: float | None = None
    baseline_high_ms: float | None = None
    best_ms: float | None = None
    best_low_ms: float | None = None
    best_high_ms: float | None = None
    speedup: float | None = None
    kept: tuple[str, ...] = ()
    leading: tuple[str, ...] = ()  # where nothing is kept: what did best, not surely yet
    trials: tuple[TriedConfiguration, ...] = ()
    left_out: tuple[RemedyLeftOut, ...] = ()
    patch: str | None = None
    by_hand: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    control: str = ""  # what baseline against baseline shows
    baseline_peak_bytes: int | None = None
    starts_differ: float | None = None  # by so much of a step, where that left a remedy undecided
    verdict: str = ""


def short_name(remedies: tuple[str, ...], kept: tuple[str, ...]) -> str:
    """Named by how it differs from what is kept, where that is shorter and as clear."""
    out = [name for name in kept if name not in remedies]
    new = [name for name in remedies if name not in kept]
    whole = " + ".join(remedies)
    if len(kept) < 2 or len(remedies) < 2 or len(out) > 1 or len(new) > 1 or not (out or new):
        return whole
    if not new:
        return f"without {out[0]}"
    return f"with {new[0]}" if not out else f"{new[0]} instead of {out[0]}"


def short_why(trial: TriedConfiguration, kept: tuple[str, ...]) -> str:
    """The reason, in which what is kept is not spelt out again."""
    whole = " + ".join(kept)
    return trial.why.replace(whole, KEPT) if len(kept) > 1 else trial.why


class TriedRemedy(msgspec.Struct, frozen=True, kw_only=True):
    """One remedy on its own, measured against the baseline."""

    remedy: str  # as it was tried: bf16, bucket-mb=50
    baseline_ms: float
    measured_ms: float | None  # None: the training failed with it
    low_ms: float | None
    high_ms: float | None
    kept: bool
    why: str = ""
    parity: str = ""
    tune: str = ""  # the tune folder

    def saved(self, step_ms: float | None) -> float | None:
        """Return what a step of this length saves of the baseline."""
        return None if step_ms is None else self.baseline_ms - step_ms

    @property
    def label(self) -> str:
        return "tried" if self.measured_ms is None else "measured"

    @property
    def words(self) -> str:
        """bf16 38.1 -> 21.0 ms (20.6 to 21.4), kept."""
        if self.measured_ms is None or self.low_ms is None or self.high_ms is None:
            return f"{self.remedy} failed: {self.why or 'no step was measured'}"
        step = f"{significant(self.baseline_ms)} -> {milliseconds(self.measured_ms)}"
        ends = interval(self.low_ms, self.high_ms)
        return f"{self.remedy} {step} ({ends}), {self.fate}"

    @property
    def fate(self) -> str:
        if self.kept:
            return "kept"
        return f"not kept: {self.why}" if self.why else "not kept"


def best_alone(result: TuneResult, tune: str = "") -> dict[str, TriedRemedy]:
    """Find each remedy's best value of those tried alone, by id. One that was kept is best."""
    best: dict[str, TriedRemedy] = {}
    for trial in result.trials:
        tried = _alone(result, trial, tune)
        if tried is None:
            continue
        name = tried.remedy.partition("=")[0]
        known = best.get(name)
        if known is None or by_result(tried) < by_result(known):
            best[name] = tried
    return best


def _alone(result: TuneResult, trial: TriedConfiguration, tune: str) -> TriedRemedy | None:
    if len(trial.remedies) != 1 or result.baseline_ms is None:
        return None
    if trial.measured_ms is None and trial.parity != FAILED:
        return None  # there was no time for it
    return TriedRemedy(
        remedy=trial.remedies[0],
        baseline_ms=result.baseline_ms,
        measured_ms=trial.measured_ms,
        low_ms=trial.measured_ms if trial.low_ms is None else trial.low_ms,
        high_ms=trial.measured_ms if trial.high_ms is None else trial.high_ms,
        kept=trial.kept or trial.remedies[0] in result.kept,
        why=trial.why,
        parity=trial.parity,
        tune=tune,
    )


def by_result(tried: TriedRemedy) -> tuple[bool, bool, float]:
    """Sort by it: what was kept, then the fastest, then what failed."""
    return not tried.kept, tried.measured_ms is None, tried.measured_ms or 0.0
