"""What-ifs in words, for every surface: what each is called, who decides a step, what it buys."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec.structs import replace

from stepscope.predict.whatif import Bench
from stepscope.records.measured_steps import MeasuredSteps
from stepscope.records.prediction import Prediction, Setting
from stepscope.records.promise import promise_name
from stepscope.records.words import plural
from stepscope.trace.measured_steps import read_measured_steps
from stepscope.trace.profiles import load_profiles
from stepscope.trace.rank_folder import read_rank_folder
from stepscope.ui.words import size
from stepscope.verify.track_record import adjust, learn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.records.explanation import RankExplanation
    from stepscope.records.job import Job
    from stepscope.records.profile import Profile
    from stepscope.records.promise import Kept
    from stepscope.records.trace import Trace

SCHEMA = 1
# What is worth trying on any step, one at a time.
USUAL = (
    Setting(name="precision", value="tf32"),
    Setting(name="precision", value="bf16"),
    Setting(name="optimizer", value="fused"),
    Setting(name="compile"),
    Setting(name="cuda-graphs"),
    Setting(name="no-sync"),
    Setting(name="no-data-wait"),
    Setting(name="batch", value="x2"),
    Setting(name="checkpoint", value="none"),
    Setting(name="checkpoint", value="blocks"),
)
OF_SEVERAL = (Setting(name="bandwidth", value="2"), Setting(name="no-straggler"))
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

_LABELS = {
    "cuda-graphs": "CUDA graphs",
    "compile": "torch.compile",
    "no-sync": "no blocking calls",
    "no-data-wait": "data always ready",
    "no-straggler": "no straggler",
    "checkpoint=blocks": "checkpointing every block",
    "checkpoint=none": "no checkpointing",
    "threads=1": "one thread",
    "threads=fit": "a thread for each free core",
}
_TEMPLATES = {
    "precision": "{}",
    "threads": "{} threads",
    "optimizer": "a {} optimizer",
    "accumulate": "{} micro-batches a step",
    "batch": "batch {}",
    "bucket-mb": "DDP buckets of {} MB",
    "zero": "ZeRO stage {}",
    "remove": "no {}",
    "scale": "scaling {}",
}
_OF = {"batch": "the batch", "bandwidth": "the bandwidth", "latency": "the latency"}
_FACTORS = {0.5: "half", 2.0: "twice"}


def bench_of(
    trace: Trace,
    rank: RankExplanation,
    job: Job | None = None,
    analysis: RankAnalysis | None = None,
) -> Bench:
    """A rank's step on the bench, with what else is known about the rank and its job."""
    profiles = _profiles(rank)
    return Bench(
        trace,
        truth=_truth(rank),
        memory=rank.memory,
        profile=next((each for each in profiles if each.device == rank.device), None),
        profiles=profiles,
        folder=read_rank_folder(Path(rank.path)),
        job=job,
        analysis=analysis,
    )


def _truth(rank: RankExplanation) -> MeasuredSteps | None:
    """What lies beside the trace, with the step of record; of a trace that was fetched, what is
    left of it."""
    if rank.step_ms.truth is None:
        return None
    ns = round(rank.step_ms.truth * 1e6)
    beside = read_measured_steps(Path(rank.path)) or MeasuredSteps(
        steps=1, steps_ns=(ns,), step_ns=ns, wall_ns=ns, device_ns=None, phases_ns={}
    )
    return replace(beside, step_ns=ns)


def _profiles(rank: RankExplanation) -> list[Profile]:
    """Of the machine that the rank ran on; a bare trace does not say which that was."""
    host = rank.part.host
    found = load_profiles(host, skip_broken=True) if host else ()
    return [profile for profile in found if profile.kind == rank.kind]


def label(setting: Setting) -> str:
    """One change as people call it."""
    name, value = setting.name, setting.value
    fixed = _LABELS.get(str(setting)) or _LABELS.get(name)
    if fixed:
        return fixed
    if name == "workers":
        among = " (the same batch among them)" if value.endswith(":strong") else ""
        count = value.partition(":")[0]
        return f"{count} {plural(int(count) if count.isdigit() else 2, 'worker')}{among}"
    if name in _OF and (name != "batch" or value.startswith("x")):
        return f"{_factor(value)} {_OF[name]}"
    template = _TEMPLATES.get(name)
    return template.format(value) if template and value else str(setting)


def _factor(value: str) -> str:
    try:
        factor = float(value.removeprefix("x"))
    except ValueError:
        return value
    return _FACTORS.get(factor) or f"{factor:g} times"


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


def adjusted(prediction: Prediction, history: Sequence[Kept]) -> Prediction:
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
    """What is worth trying on this step: recomputing buys memory alone, where that is known; what
    ranks do to each other is tried where there are several."""
    found = [each for each in USUAL if bench.context.memory or str(each) != "checkpoint=blocks"]
    return found + (
        list(OF_SEVERAL) if bench.context.job or bench.context.trace.collectives else []
    )


def try_each(bench: Bench, settings: Sequence[Setting], history: Sequence[Kept] = ()) -> Tried:
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
