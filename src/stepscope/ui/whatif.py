"""What-ifs in words, for every surface: what each is called, who decides a step, what it buys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec.structs import replace

from stepscope.predict.whatif import Bench
from stepscope.predict.whatifs import WHATIFS
from stepscope.records.figures import size
from stepscope.records.prediction import Prediction, Setting
from stepscope.records.promise import promise_name
from stepscope.verify.track_record import adjust, learn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.records.explanation import RankExplanation
    from stepscope.records.job import Job
    from stepscope.records.promise import TrackedPromise

SCHEMA = 1
WORTH = 0.02  # a change of the time for a sample that is worth having
DECISIVE = 0.92  # whoever needs this much of the step alone decides it

# Where the step as it is now comes from.
BASIS = {
    "measured": "measured without the profiler",
    "calibrated": "the profiler's cost taken out",
    "profiled": "as the profiler recorded it",
}

Verdict = Literal["faster", "slower", "no difference"]
Decider = Literal["host", "device", "both"]


def make_bench(analysis: RankAnalysis, rank: RankExplanation, job: Job | None = None) -> Bench:
    """A rank's step on the bench, with its memory and its job."""
    return Bench(analysis, memory=rank.memory, job=job)


def label(setting: Setting) -> str:
    """One change as people call it."""
    whatif = WHATIFS.get(setting.name)
    return whatif.describe(setting.value) if whatif else str(setting)


def labels(settings: Sequence[Setting]) -> str:
    """Changes together."""
    return " + ".join(label(setting) for setting in settings) or "no change"


def times(factor: float) -> str:
    """How often."""
    return f"{factor:.{0 if factor >= 9.95 else 1 if factor >= 1.15 else 2}f}"


def figures(value: float) -> str:
    """Three significant ones."""
    large = abs(value)
    decimals = 0 if large >= 99.95 or not large else 1 if large >= 9.995 else 2
    return f"{value:,.{decimals}f}"


def interval(low_ms: float, high_ms: float) -> str:
    """Both ends, as exact as the number between them."""
    return f"{figures(low_ms)} to {figures(high_ms)}"


def samples(prediction: Prediction) -> float:
    """A step's samples with the change over those without."""
    if not prediction.baseline_ms:
        return 1.0
    return prediction.throughput_factor * prediction.predicted_ms / prediction.baseline_ms


def saved_ms(prediction: Prediction) -> tuple[float, float, float]:
    """Of one step as it is now, with low and high: a larger batch is shared among its samples."""
    many = samples(prediction)
    base = prediction.baseline_ms
    speeds = (prediction.speedup, prediction.speedup_low, prediction.speedup_high)
    saved, low, high = (base - base / (speed * many) for speed in speeds)
    return saved, low, high


def judge(prediction: Prediction) -> Verdict:
    """Whether the change is worth having."""
    saved, _, _ = saved_ms(prediction)
    if abs(saved) < WORTH * prediction.baseline_ms:
        return "no difference"
    return "faster" if saved > 0 else "slower"


def is_sure(prediction: Prediction) -> bool:
    """Whether the whole interval lies on one side of the step as it is."""
    _, low, high = saved_ms(prediction)
    return low > 0 or high < 0


def verdict(prediction: Prediction) -> str:
    """The prediction in a sentence."""
    what = labels(prediction.settings)
    both = (
        f"{figures(prediction.baseline_ms)} -> {figures(prediction.predicted_ms)} ms "
        f"({interval(prediction.low_ms, prediction.high_ms)})"
    )
    found = judge(prediction)
    if found == "no difference":
        return f"{what} would make no real difference (under {WORTH:.0%}): {both}"
    would = "would" if is_sure(prediction) else "would probably"
    if abs(samples(prediction) - 1) > 1e-6:
        pace = f"{times(prediction.throughput_factor)} times as many samples a second"
        return f"{what} {would} give {pace}: a step of {both}"
    return f"{what} {would} make this step {_changed(prediction.speedup)}: {both}"


def _changed(speedup: float) -> str:
    if speedup >= 1.5:
        return f"{times(speedup)} times faster"
    if speedup >= 1:
        return f"{1 - 1 / speedup:.0%} shorter"
    slowdown = 1 / speedup
    return f"{slowdown - 1:.0%} longer" if slowdown < 2 else f"{times(slowdown)} times as long"


def decides(step_ms: float, host_ms: float, device_ms: float) -> Decider:
    """Who is busy for the whole step; both, where they wait for each other."""
    longest = max(host_ms, device_ms)
    if longest < DECISIVE * step_ms:
        return "both"
    return "device" if device_ms >= host_ms else "host"


def why(before: Prediction, after: Prediction, *, on_host: bool = False) -> str:
    """Who decides the step, now and then; on a CPU alone there is nobody else."""
    if on_host:
        both = f"{figures(before.host_ms)} -> {figures(after.host_ms)} ms of work"
        return f"all of it runs on the host: {both}"
    now = decides(before.predicted_ms, before.host_ms, before.device_ms)
    then = decides(after.predicted_ms, after.host_ms, after.device_ms)
    still = " still" if now == then else ""
    sentence = f"now {_decided(now, before)}; then {_decided(then, after, still)}"
    if judge(after) == "slower" and now == "host" and after.host_ms > before.host_ms:
        return f"{sentence}: it is host-bound, and this gives the host more to do"
    return sentence


def _decided(who: Decider, at: Prediction, still: str = "") -> str:
    host, device = figures(at.host_ms), figures(at.device_ms)
    if who == "both":
        return f"host and device{still} wait for each other: {host} and {device} ms of work"
    if who == "host":
        return f"the host is{still} the bottleneck: {host} ms of work, the device has {device}"
    return f"the device is{still} the bottleneck: {device} ms of work, the host has {host}"


def headline(rank: RankExplanation, before: Prediction, about: str) -> str:
    """Which step is changed, and how long it is."""
    words = (
        f"{about} · {rank.device or rank.kind.upper()} · {figures(before.baseline_ms)} ms a step"
    )
    words += f", {BASIS[before.baseline_from]}"
    profiled = rank.step_ms.profiled
    if profiled and abs(profiled / before.baseline_ms - 1) > 0.005:
        words += f" ({figures(profiled)} ms with it)"
    return words


def memory_words(prediction: Prediction) -> str:
    """The predicted peak, or that nobody knows."""
    return "not known" if prediction.peak_bytes is None else size(prediction.peak_bytes)


def prediction_json(prediction: Prediction, before: Prediction) -> dict[str, Any]:
    """`whatif --json`, schema 1: the agreed names first."""
    saved, low, high = saved_ms(prediction)
    return {
        "schema": SCHEMA,
        "baseline_ms": prediction.baseline_ms,
        "predicted_ms": prediction.predicted_ms,
        "low_ms": prediction.low_ms,
        "high_ms": prediction.high_ms,
        "speedup": prediction.speedup,
        "peak_bytes": prediction.peak_bytes,
        "assumptions": list(prediction.assumptions),
        "refused": list(prediction.refused),
        "settings": [str(setting) for setting in prediction.settings],
        "verdict": judge(prediction),
        "saved_ms": saved,
        "saved_low_ms": low,
        "saved_high_ms": high,
        "speedup_low": prediction.speedup_low,
        "speedup_high": prediction.speedup_high,
        "throughput_factor": prediction.throughput_factor,
        "host_ms": prediction.host_ms,
        "device_ms": prediction.device_ms,
        "decides": decides(prediction.predicted_ms, prediction.host_ms, prediction.device_ms),
        "peak_low_bytes": prediction.peak_low_bytes,
        "peak_high_bytes": prediction.peak_high_bytes,
        "baseline_low_ms": prediction.baseline_low_ms,
        "baseline_high_ms": prediction.baseline_high_ms,
        "baseline_from": prediction.baseline_from,
        "baseline_host_ms": before.host_ms,
        "baseline_device_ms": before.device_ms,
        "baseline_peak_bytes": prediction.baseline_peak_bytes,
        "profiled_ms": prediction.profiled_ms,
    }


def adjusted(prediction: Prediction, history: Sequence[TrackedPromise]) -> Prediction:
    """Moved and widened by what became of earlier predictions of the same kind, and saying so."""
    name = promise_name(setting.name for setting in prediction.settings)
    lesson = learn(name, history)
    if lesson is None:
        return prediction
    raw = prediction.predicted_ms
    ms, low, high = adjust(name, raw, prediction.low_ms, prediction.high_ms, history)
    stretch = lesson.stretch
    tried = lesson.deliveries
    said = (
        f"{tried} earlier prediction{'s' if tried > 1 else ''} of this kind that "
        f"{'were' if tried > 1 else 'was'} tried moved it from {figures(raw)} to {figures(ms)} ms "
        f"({ms / raw - 1:+.1%}) and made its interval {stretch:.2g} times as wide "
        "(stepscope record)"
    )
    return replace(
        prediction,
        predicted_ms=ms,
        low_ms=low,
        high_ms=high,
        throughput_factor=prediction.throughput_factor * raw / ms,
        speedup_low=_stretched(prediction.speedup_low, prediction.speedup, stretch) * raw / ms,
        speedup_high=_stretched(prediction.speedup_high, prediction.speedup, stretch) * raw / ms,
        assumptions=(*prediction.assumptions, said),
    )


def _stretched(end: float, middle: float, by: float) -> float:
    return middle * math.exp(by * math.log(end / middle))


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """Changes tried one at a time: what each would do, the best first, and those that refused."""

    before: Prediction
    predictions: tuple[Prediction, ...]
    refused: tuple[str, ...]


def usual(bench: Bench) -> list[Setting]:
    """Changes worth trying on this step, one at a time.

    What saves memory is tried only if memory was captured, and what changes how ranks work together
    only if there are several.
    """
    context = bench.context
    several = bool(context.job or context.trace.collectives)
    return [
        Setting(name=whatif.name, value=value)
        for whatif in WHATIFS.values()
        for value in whatif.usual
        if (several or not whatif.for_several_ranks)
        and (context.memory or value not in whatif.saves_memory)
    ]


def try_each(
    bench: Bench, settings: Sequence[Setting], history: Sequence[TrackedPromise] = ()
) -> Tried:
    """One at a time."""
    found: list[Prediction] = []
    refused: list[str] = []
    for setting in settings:
        prediction = adjusted(bench.predict([setting]), history)
        if prediction.refused:
            refused += prediction.refused
        else:
            found.append(prediction)
    found.sort(key=lambda prediction: -prediction.throughput_factor)
    return Tried(
        before=bench.predict([]),
        predictions=tuple(found),
        refused=tuple(dict.fromkeys(refused)),
    )
