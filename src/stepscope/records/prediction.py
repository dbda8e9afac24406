"""What a change would save, predicted before anybody tries it, on this device or on others;
and the promises of the track record with what was measured later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from stepscope.records.quality import Ms, Ranks, Share, SomeMs, UnixS
from stepscope.text.figures import factor, interval, milliseconds, signed, significant, size
from stepscope.text.notebook import Length, card, line

if TYPE_CHECKING:
    from stepscope.records.parameter_server import ConsistencyPromise

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


# What a change buys, in words: time that a step saves, or samples a second that it adds.
#
# "saves" stands only where the whole interval lies on one side of zero.

_SAME_SAMPLES = 1e-6
_WIDE = 3.0  # times its low end


class PredictedGain(msgspec.Struct, frozen=True, kw_only=True):
    """Of one change: what the samples of a present step take less, with its interval."""

    saved_ms: float
    low_ms: float
    high_ms: float
    step_ms: float  # the present step
    changed_ms: float | None = None  # the step with the change
    samples_factor: float = 1.0  # samples of a step with the change, over those without

    @property
    def is_sure(self) -> bool:
        """Whether the whole interval is on one side of zero."""
        return self.low_ms > 0 or self.high_ms < 0

    @property
    def is_known(self) -> bool:
        """An interval wider than the step says nothing."""
        return self.high_ms - self.low_ms < self.step_ms

    @property
    def changes_samples(self) -> bool:
        """Such a step does other work: only samples a second compare with the present one."""
        return abs(self.samples_factor - 1) > _SAME_SAMPLES

    def words(self) -> tuple[str, str]:
        """The gain, and the interval in brackets; the second is empty if the first holds it."""
        if not self.is_known:
            return "not known", f"({self._change()})"
        if self.changes_samples:
            middle, low, high = (
                self.step_ms / max(1e-9, self.step_ms - saved)
                for saved in (self.saved_ms, self.low_ms, self.high_ms)
            )
            if not self.is_sure:
                return f"{factor(low)} to {factor(high)} times the samples/s", ""
            return f"{factor(middle)} times the samples/s", f"({factor(low)} to {factor(high)})"
        if not self.is_sure:
            return f"may change the step by {self._change()}", ""
        if self.saved_ms >= 0:
            return f"saves {milliseconds(self.saved_ms)}", f"({self._ends(1)})"
        return f"costs {milliseconds(-self.saved_ms)}", f"({self._ends(-1)})"

    def sentence(self, of: str = "") -> str:
        """Name the step that it is a gain of; `of` says that step in other words."""
        gain, ends = self.words()
        if not self.is_known:
            return f"has an unknown effect {ends}"
        if self.changes_samples:
            return f"{gain}{f' {ends}' if ends else ''}{self._becomes()}"
        if not self.is_sure:
            return gain
        verb, _, amount = gain.partition(" ")
        # The middle of such an interval would promise too much.
        least, most = sorted((abs(self.low_ms), abs(self.high_ms)))
        if most > _WIDE * least:
            amount = ends.strip("()")
        return f"{verb} {amount.removesuffix(' ms')} of {of or milliseconds(self.step_ms)}"

    def _becomes(self) -> str:
        if self.changed_ms is None:
            return ""
        now, then = milliseconds(self.step_ms), milliseconds(self.changed_ms)
        return ", in steps as long" if now == then else f", in steps of {then} instead of {now}"

    def _change(self) -> str:
        """Say how the step changes: what is saved is taken off."""
        return f"{signed(-self.high_ms)} to {signed(-self.low_ms)} ms"

    def _ends(self, sign: int) -> str:
        low, high = sorted((sign * self.low_ms, sign * self.high_ms))
        return interval(low, high)


# Predictions that `whatif` promised, and what was measured: the lines of the track record.

RECORD_SCHEMA = 1
_Change = Annotated[float, msgspec.Meta(ge=-1)]  # b over a, less one


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What identifies a training step; None for what was not captured."""

    script: str | None = None  # the file's name, without its folder
    world_size: Ranks | None = None
    device: str | None = None
    signature: str | None = None  # of the operators and their shapes

    def differs_in(self, other: Workload) -> tuple[str, ...]:
        """Return what is known of both and differs."""
        return tuple(
            name
            for name in ("script", "world_size", "device", "signature")
            if None not in (ours := getattr(self, name), theirs := getattr(other, name))
            and ours != theirs
        )

    def is_same(self, other: Workload) -> bool:
        """The same operators with the same shapes, and nothing known of both differs."""
        known = self.signature is not None and other.signature is not None
        return known and not self.differs_in(other)


class Promise(msgspec.Struct, frozen=True, kw_only=True, tag="promise", tag_field="kind"):
    """One prediction, written down before anybody tried the change."""

    id: str
    when_unix: UnixS
    host: str
    settings: tuple[Setting, ...]
    baseline_ms: SomeMs
    predicted_ms: SomeMs
    low_ms: Ms
    high_ms: Ms
    workload: Workload = Workload()
    path: str | None = None  # of the baseline's run or trace
    basis: StepBasis = "median"  # older promises are about medians
    schema: int = RECORD_SCHEMA

    @property
    def name(self) -> str:
        """The what-ifs without their values: predictions of one name share a history."""
        return promise_name(setting.name for setting in self.settings)

    @property
    def words(self) -> str:
        """Return the settings as the user wrote them."""
        return " ".join(str(setting) for setting in self.settings)


class Delivery(msgspec.Struct, frozen=True, kw_only=True, tag="delivery", tag_field="kind"):
    """What a comparison measured for a promise."""

    promise: str
    when_unix: UnixS
    a_ms: SomeMs
    b_ms: SomeMs
    change: _Change
    low: _Change
    high: _Change
    confidence: Share
    verdict: str
    named: bool = False  # the user said which promise it was
    seen: tuple[str, ...] = ()  # traits of the promised change, in what was captured of A and B
    a_path: str | None = None
    b_path: str | None = None
    basis: StepBasis = "median"  # that of its promise
    schema: int = RECORD_SCHEMA


class Forgotten(msgspec.Struct, frozen=True, kw_only=True, tag="forgotten", tag_field="kind"):
    """A promise, or only its deliveries so far, that no longer counts."""

    promise: str
    when_unix: UnixS
    delivery_only: bool = False
    schema: int = RECORD_SCHEMA


class TrackedPromise(msgspec.Struct, frozen=True, kw_only=True):
    """A promise and, once the change was tried, its newest delivery."""

    promise: Promise
    delivery: Delivery | None = None

    @property
    def delivered_ms(self) -> float | None:
        """The promise's baseline, changed as the measured step changed."""
        if self.delivery is None:
            return None
        return self.promise.baseline_ms * self.delivery.b_ms / self.delivery.a_ms

    @property
    def error(self) -> float | None:
        """Delivered over predicted, minus one: above zero, the step is longer than promised."""
        delivered = self.delivered_ms
        return None if delivered is None else delivered / self.promise.predicted_ms - 1

    @property
    def inside(self) -> bool | None:
        """Whether the delivered step lies in the promised interval."""
        delivered = self.delivered_ms
        if delivered is None:
            return None
        return self.promise.low_ms <= delivered <= self.promise.high_ms


def promise_name(names: Iterable[str]) -> str:
    """One name for several what-ifs, whatever their order."""
    return "+".join(sorted(names))


# One recorded step on many GPUs, side by side.

Decider = Literal["device", "host"]


class GpuPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """The step on one GPU. What cannot be said is None, and `why` says the reason."""

    gpu: str
    step_ms: float | None
    low_ms: float | None = None
    high_ms: float | None = None
    speedup: float | None = None  # over the step as recorded
    samples_per_s: float | None = None  # None if those of a step are not known
    decides: Decider | None = None
    device_ms: float | None = None
    host_ms: float | None = None
    modelled_share: float | None = None  # of the device time: by bandwidth alone
    fits: bool | None = None  # None: peak memory is not known
    memory_bytes: float
    largest_batch: int | None = None
    price: float | None = None  # per hour
    samples_per_money: float | None = None  # steps, if the batch is not known
    why: str = ""


class GpuComparison(msgspec.Struct, frozen=True, kw_only=True):
    source: str  # as the driver prints it
    source_gpu: str  # its name in the table
    batch: int | None
    baseline_ms: float
    peak_bytes: int | None
    gpus: tuple[GpuPrediction, ...]  # the shortest step first, those without one last

    @property
    def counts_samples(self) -> bool:
        """Steps are counted where the samples of a step are not known."""
        return any(row.samples_per_s is not None for row in self.gpus)
