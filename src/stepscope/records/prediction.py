"""What a change would save, predicted before anybody tries it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from stepscope.records.figures import factor, interval, milliseconds, significant, size
from stepscope.records.notebook import Length, card, line

if TYPE_CHECKING:
    from stepscope.records.together_summary import ConsistencyPromise

# What "the step" is: the mean of a run's steady steps, stalls among them, or a typical one: the
# median of steps, or what a trace shows.
StepBasis = Literal["mean", "median"]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One change as the user writes it: precision=bf16."""

    name: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.name}={self.value}" if self.value else self.name

    @classmethod
    def parse(cls, text: str) -> Setting:
        """NAME or NAME=VALUE."""
        name, _, value = text.partition("=")
        return cls(name=name.strip(), value=value.strip())


class PeakMemory(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int
    low_bytes: int
    high_bytes: int

    def plus(self, more_bytes: int) -> PeakMemory:
        sizes = msgspec.structs.asdict(self)
        return PeakMemory(**{name: size + more_bytes for name, size in sizes.items()})


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A step with the change, and the step without it: the mean of the run's steady steps, stalls
    among them, if those are known."""

    settings: tuple[Setting, ...]
    baseline_ms: float
    baseline_low_ms: float
    baseline_high_ms: float
    baseline_from: str  # measured, calibrated (the profiler's cost taken out) or profiled
    profiled_ms: float
    predicted_ms: float
    low_ms: float
    high_ms: float
    basis: StepBasis = "median"
    baseline_stall_ms: float = 0.0  # of the average step, all causes
    stall_ms: float = 0.0
    host_ms: float  # what the host would need if it never waited
    device_ms: float  # what the device would need if it never waited
    peak_bytes: int | None = None
    peak_low_bytes: int | None = None
    peak_high_bytes: int | None = None
    baseline_peak_bytes: int | None = None
    throughput_factor: float = 1.0  # samples per second, over the baseline's
    # Narrower than the intervals of the two steps, whose doubt is partly the same.
    speedup_low: float = 1.0
    speedup_high: float = 1.0
    assumptions: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    pointless: tuple[Setting, ...] = ()  # refused because the step has nothing to change
    applied: tuple[Setting, ...] = ()  # the settings that did not refuse
    consistency: ConsistencyPromise | None = None  # of training through a parameter server

    @property
    def speedup(self) -> float:
        return self.baseline_ms / self.predicted_ms if self.predicted_ms else 1.0

    @property
    def samples_factor(self) -> float:
        """Samples per step with the change, over those without."""
        return self.throughput_factor / self.speedup if self.baseline_ms else 1.0

    @property
    def changes_samples(self) -> bool:
        return abs(self.samples_factor - 1) > 1e-6

    @property
    def typical_ms(self) -> float:
        """The predicted step without its stalls."""
        return self.predicted_ms - self.stall_ms

    @property
    def saved_ms(self) -> float:
        """Per step; negative if the change makes it longer."""
        return self.baseline_ms - self.predicted_ms

    def __repr__(self) -> str:
        return line("Prediction", self._change(), self._step())

    def _repr_html_(self) -> str:
        rows = [
            ("memory", self._memory()),
            ("assumed", "; ".join(self.assumptions)),
            ("refused", "; ".join(self.refused)),
        ]
        now = Length("now", self.baseline_ms, milliseconds(self.baseline_ms))
        words = f"{milliseconds(self.predicted_ms)} ({interval(self.low_ms, self.high_ms)})"
        then = Length("with it", self.predicted_ms, words, self.low_ms, self.high_ms)
        title = f"What if {self._change()}"
        return card(title, rows, aside=f"{self._gain()}, predicted", lengths=(now, then))

    def _gain(self) -> str:
        if self.changes_samples:
            return f"{factor(self.throughput_factor)} times as many samples per second"
        return f"{factor(self.speedup)} times as fast"

    def _memory(self) -> str:
        if self.peak_bytes is None:
            return ""
        if self.baseline_peak_bytes is None:
            return f"{size(self.peak_bytes)} at the peak"
        return f"{size(self.baseline_peak_bytes)} -> {size(self.peak_bytes)} at the peak"

    def _change(self) -> str:
        return " + ".join(map(str, self.settings)) or "no change"

    def _step(self) -> str:
        steps = f"{significant(self.baseline_ms)} -> {milliseconds(self.predicted_ms)} per step"
        return f"{steps} ({interval(self.low_ms, self.high_ms)})"


class ScalingPoint(msgspec.Struct, frozen=True, kw_only=True):
    workers: int
    step_ms: float
    low_ms: float
    high_ms: float
    throughput: float  # samples per second of all workers, over the present job's
    throughput_low: float
    throughput_high: float
    efficiency: float  # throughput over that of as many times one worker (else: times the present)
    comm_ms: float | None  # all collectives, one after the other; None: as measured
    exposed_ms: float | None  # what they add to the step
    straggling: float  # the slowest worker's own step over a usual one
    basis: str  # measured, or where the collectives' times come from


class ScalingCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Steps by number of workers. Strong: all workers share one batch; weak: each keeps its own."""

    strong: bool
    present: int  # workers of the trace
    batch: int | None  # per worker, if the trace says
    points: tuple[ScalingPoint, ...]
    assumptions: tuple[str, ...] = ()  # of the last point
    refused: tuple[str, ...] = ()
