"""Put predictions into words: what a change is called, what it saves, what limits the step,
also for a run through a parameter server.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import to_builtins
from msgspec.structs import replace

from stepscope.changes import CHANGES, PREDICTED
from stepscope.errors import NotCapturedError, NotPredictedError, StepscopeError, UsageError
from stepscope.explain.cpu_use import is_beside_others
from stepscope.predict.engine import Bench
from stepscope.predict.whatifs import settings_for_remedy
from stepscope.records.change_values import Consistency
from stepscope.records.explanation import Finding, RankExplanation
from stepscope.records.job import Job
from stepscope.records.parameter_server import (
    BlockedBy,
    ConsistencyPromise,
    ShardLoad,
    Staleness,
    TogetherSummary,
    TogetherVerdict,
    WorkerShare,
)
from stepscope.records.prediction import (
    PredictedGain,
    Prediction,
    Setting,
    TrackedPromise,
    promise_name,
)
from stepscope.text.figures import (
    duration,
    factor,
    interval,
    milliseconds,
    percent,
    signed_percent,
    significant,
    size,
    trimmed,
)
from stepscope.text.words import counted
from stepscope.trace.discover import find_traces
from stepscope.trace.run_folder.run_state import is_server_file, server_file
from stepscope.trace.run_folder.server_events import read_server_events
from stepscope.ui.topics.section import Column, Table
from stepscope.ui.words import or_dash
from stepscope.verify.track_record import adjust, learn

if TYPE_CHECKING:
    from stepscope.explain.rank_analysis import RankAnalysis

SCHEMA = 1
WORTH = 0.02  # of the time per sample: a smaller change is not worth having
WORTH_FREEING = 0.05  # of the peak
DECISIVE = 0.92  # of the step: whoever is busy this long decides it

# Where the present step's length comes from.
BASIS = {
    "measured": "measured without the profiler",
    "calibrated": "without the profiler's cost",
    "profiled": "as the profiler recorded it",
}

Verdict = Literal["faster", "slower", "no difference"]
Decider = Literal["host", "device", "both"]
# What limits the step, in a table and in a sentence.
BOUND: dict[Decider, str] = {"host": "CPU", "device": "GPU", "both": "both"}
_BOUND_WORDS: dict[Decider, str] = {
    "host": "host-bound",
    "device": "GPU-bound",
    "both": "CPU and GPU wait for each other",
}


def make_bench(analysis: RankAnalysis, rank: RankExplanation, job: Job | None = None) -> Bench:
    """Put a rank's step on the bench, with its memory and its job."""
    return Bench(analysis, memory=rank.memory, job=job)


def label(setting: Setting) -> str:
    """One change as people call it."""
    is_known = setting.name in PREDICTED
    return CHANGES[setting.name].describe(setting.value) if is_known else str(setting)


def labels(settings: Sequence[Setting]) -> str:
    """Several changes together."""
    return " + ".join(label(setting) for setting in settings) or "no change"


def saved_ms(prediction: Prediction) -> tuple[float, float, float]:
    """Return what the samples of one present step take less, with low and high."""
    samples = prediction.samples_factor
    base = prediction.baseline_ms
    speedups = (prediction.speedup, prediction.speedup_low, prediction.speedup_high)
    saved, low, high = (base - base / (speedup * samples) for speedup in speedups)
    return saved, low, high


def gain_of(prediction: Prediction) -> PredictedGain:
    """Return what the change buys, as every surface says it."""
    saved, low, high = saved_ms(prediction)
    return PredictedGain(
        saved_ms=saved,
        low_ms=low,
        high_ms=high,
        step_ms=prediction.baseline_ms,
        changed_ms=prediction.predicted_ms,
        samples_factor=prediction.samples_factor,
    )


def judge(prediction: Prediction) -> Verdict:
    """Whether the change is worth having."""
    saved, _, _ = saved_ms(prediction)
    if abs(saved) < WORTH * prediction.baseline_ms:
        return "no difference"
    return "faster" if saved > 0 else "slower"


def is_sure(prediction: Prediction) -> bool:
    """Whether the whole interval lies on one side of the present step."""
    _, low, high = saved_ms(prediction)
    return low > 0 or high < 0


def frees_memory(prediction: Prediction) -> bool:
    """Whether the peak is lower by enough to matter, with its whole interval."""
    before, after = prediction.baseline_peak_bytes, prediction.peak_bytes
    if not before or after is None:
        return False
    highest = prediction.peak_high_bytes or after
    return after <= (1 - WORTH_FREEING) * before and highest < before


def verdict(prediction: Prediction) -> str:
    """The prediction in a sentence."""
    change = labels(prediction.settings)
    steps = (
        f"{significant(prediction.baseline_ms)} -> {milliseconds(prediction.predicted_ms)} "
        f"({interval(prediction.low_ms, prediction.high_ms)})"
    )
    if judge(prediction) != "faster" and frees_memory(prediction):
        return _memory_verdict(prediction, change, steps)
    if judge(prediction) == "no difference":
        return f"{change} would change the step by less than {trimmed(percent(WORTH))}: {steps}"
    if not is_sure(prediction):
        gain = gain_of(prediction)
        may = "may give " if gain.changes_samples and gain.is_known else ""
        return f"{change} {may}{gain.words()[0] if may else gain.sentence()}: {steps}"
    if prediction.changes_samples:
        throughput = f"{factor(prediction.throughput_factor)} times as many samples per second"
        return f"{change} would give {throughput}, in a step of {steps}"
    return f"{change} would make this step {_describe_speedup(prediction.speedup)}: {steps}"


def _memory_verdict(prediction: Prediction, change: str, steps: str) -> str:
    """Return what a change that costs time is good for."""
    before, after = prediction.baseline_peak_bytes or 0, prediction.peak_bytes or 0
    time = "change the step by little"
    if judge(prediction) == "slower":
        time = f"make the step {_describe_speedup(prediction.speedup)}"
    less = percent(1 - after / before)
    peaks = f"{size(before)} -> {size(after)}"
    return f"{change} would cut peak memory by {less} ({peaks}) and {time}: {steps}"


def _describe_speedup(speedup: float) -> str:
    if speedup >= 1.5:
        return f"{factor(speedup)} times faster"
    if speedup >= 1:
        return f"{percent(1 - 1 / speedup)} shorter"
    slowdown = 1 / speedup
    return (
        f"{percent(slowdown - 1)} longer" if slowdown < 2 else f"{factor(slowdown)} times as long"
    )


def decides(step_ms: float, host_ms: float, device_ms: float) -> Decider:
    """Who is busy for the whole step; "both" if they wait for each other."""
    longest = max(host_ms, device_ms)
    if longest < DECISIVE * step_ms:
        return "both"
    return "device" if device_ms >= host_ms else "host"


def why(before: Prediction, after: Prediction, *, on_host: bool = False) -> str:
    """Say whether the CPU or the GPU limits the step, before and after, and what stalls add."""
    typical = _describe_typical(before, after, on_host=on_host)
    if not before.stall_ms:
        return typical
    then = milliseconds(after.stall_ms) if after.stall_ms else "nothing"
    now = milliseconds(before.stall_ms)
    return f"{typical}. Stalls add {now} to an average step now, {then} after"


def _describe_typical(before: Prediction, after: Prediction, *, on_host: bool) -> str:
    """Without a GPU it is always the CPU that decides."""
    if on_host:
        work = f"{significant(before.host_ms)} to {milliseconds(after.host_ms)}"
        if after.host_ms == before.host_ms:
            return f"the whole step runs on the CPU, with {milliseconds(after.host_ms)} of work"
        way = "falls" if after.host_ms < before.host_ms else "grows"
        return f"CPU work {way} from {work}"
    now = decides(before.typical_ms, before.host_ms, before.device_ms)
    then = decides(after.typical_ms, after.host_ms, after.device_ms)
    first, second = (
        f"GPU {milliseconds(step.device_ms)}, CPU {milliseconds(step.host_ms)}"
        for step in (before, after)
    )
    if now == then:
        sentence = f"{_BOUND_WORDS[now]} before ({first}) and after ({second})"
    else:
        sentence = f"{_BOUND_WORDS[now]} before ({first}), {_BOUND_WORDS[then]} after ({second})"
    if judge(after) == "slower" and now == "host" and after.host_ms > before.host_ms:
        return f"{sentence}. The change gives the CPU more work, and the GPU waits for it"
    return sentence


def headline(rank: RankExplanation, before: Prediction, about: str) -> str:
    """Say which step is changed, and how long it is."""
    step = f"{milliseconds(before.baseline_ms)} per step, {BASIS[before.baseline_from]}"
    profiled, typical = rank.step_ms.profiled, before.baseline_ms - before.baseline_stall_ms
    if before.baseline_stall_ms:
        step += f": {milliseconds(typical)}"
    if profiled and abs(profiled / typical - 1) > 0.005:
        step += f" ({milliseconds(profiled)} with it)"
    if before.baseline_stall_ms:
        step += f" plus {milliseconds(before.baseline_stall_ms)} of stalls on average"
    return f"{about} · {rank.device or rank.kind.upper()} · {step}"


def memory_words(prediction: Prediction) -> str:
    """The predicted peak, or that it is not known."""
    return "not known" if prediction.peak_bytes is None else size(prediction.peak_bytes)


def _change_name(prediction: Prediction) -> str:
    if len(prediction.settings) > 1:
        return "all together"
    return str(prediction.settings[0]) if prediction.settings else "no change"


_STEP_COLUMNS: tuple[Column[Prediction], ...] = (
    Column("", _change_name),
    Column(">step", lambda step: milliseconds(step.predicted_ms)),
    Column(">95%", lambda step: interval(step.low_ms, step.high_ms)),
    Column(">samples/s", lambda step: f"{factor(step.throughput_factor)}x"),
    Column(">CPU", lambda step: significant(step.host_ms)),
    Column(">GPU", lambda step: significant(step.device_ms)),
    Column("bottleneck", lambda s: BOUND[decides(s.typical_ms, s.host_ms, s.device_ms)]),
    Column(">peak memory", memory_words),
)


def step_table(steps: Sequence[Prediction]) -> Table[Prediction]:
    """The step as each prediction has it."""
    return Table(columns=_STEP_COLUMNS, rows=steps)


def prediction_json(prediction: Prediction, before: Prediction) -> dict[str, Any]:
    """`whatif --json`, schema 1: the agreed names first."""

    def of(*names: str) -> dict[str, Any]:
        return {name: getattr(prediction, name) for name in names}

    saved, low, high = saved_ms(prediction)
    return {
        "schema": SCHEMA,
        **of("baseline_ms", "predicted_ms", "low_ms", "high_ms", "speedup", "peak_bytes"),
        "assumptions": list(prediction.assumptions),
        "refused": list(prediction.refused),
        "settings": [str(setting) for setting in prediction.settings],
        "verdict": judge(prediction),
        "saved_ms": saved,
        "saved_low_ms": low,
        "saved_high_ms": high,
        **of("speedup_low", "speedup_high", "throughput_factor", "host_ms", "device_ms"),
        "decides": decides(prediction.typical_ms, prediction.host_ms, prediction.device_ms),
        **of("peak_low_bytes", "peak_high_bytes"),
        **of("baseline_low_ms", "baseline_high_ms", "baseline_from"),
        "baseline_host_ms": before.host_ms,
        "baseline_device_ms": before.device_ms,
        **of("baseline_peak_bytes", "profiled_ms", "basis", "stall_ms", "baseline_stall_ms"),
        "consistency": promise_json(prediction.consistency),
    }


def adjusted(prediction: Prediction, history: Sequence[TrackedPromise]) -> Prediction:
    """Move and widen a prediction by the results of earlier ones of its kind, and say so."""
    name = promise_name(setting.name for setting in prediction.settings)
    lesson = learn(name, history)
    if lesson is None:
        return prediction
    raw = prediction.predicted_ms
    ms, low, high = adjust(name, raw, prediction.low_ms, prediction.high_ms, history)
    stretch, tried = lesson.stretch, lesson.deliveries

    def widened(end: float) -> float:
        middle = prediction.speedup
        return middle * math.exp(stretch * math.log(end / middle)) * raw / ms

    assumption = (
        f"corrected by the results of {counted(tried, 'earlier prediction')} of this kind "
        f"(stepscope whatif --history): {significant(raw)} -> {milliseconds(ms)} "
        f"({signed_percent(ms / raw - 1)}), with an interval {factor(stretch)} times as wide"
    )
    return replace(
        prediction,
        predicted_ms=ms,
        low_ms=low,
        high_ms=high,
        # What decides the step, and its parts, are told in the same base as its length.
        host_ms=prediction.host_ms * ms / raw,
        device_ms=prediction.device_ms * ms / raw,
        stall_ms=prediction.stall_ms * ms / raw,
        throughput_factor=prediction.throughput_factor * raw / ms,
        speedup_low=widened(prediction.speedup_low),
        speedup_high=widened(prediction.speedup_high),
        assumptions=(*prediction.assumptions, assumption),
    )


def predict_together(bench: Bench, settings: Sequence[Setting]) -> Prediction:
    """Predict changes made together, as far as the step takes them. Raise NotPredictedError if it
    takes none."""
    prediction = bench.predict(settings)
    if not prediction.applied:
        raise NotPredictedError("; ".join(dict.fromkeys(prediction.refused)))
    return replace(prediction, settings=prediction.applied)


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """Changes tried one at a time: predictions, the best first, and refusals."""

    before: Prediction
    predictions: tuple[Prediction, ...]
    refused: tuple[str, ...]
    pointless: tuple[Setting, ...] = ()  # the step has nothing that these could change
    defects: tuple[str, ...] = ()  # of the refusals, those that are our mistakes


def usual(bench: Bench) -> list[Setting]:
    """Changes worth trying on this step, one at a time.

    What saves memory is tried only if memory was captured, what changes how ranks work together
    only if there are several, and what removes stalls only if there are some.
    """
    context = bench.context
    several = bool(context.job or context.trace.collectives)
    # What a larger batch takes on cores of one's own cannot be told from steps beside others.
    alone = not is_beside_others(context.cpu)
    return [
        Setting(name=name, value=value)
        for name, change in PREDICTED.items()
        for value in change.usual
        if (several or not change.for_several_ranks)
        and (alone or name != "batch")
        and (context.stalls_ns or not change.needs_every_step)
        and (context.memory or value not in change.saves_memory)
    ]


def with_offered(changes: Sequence[Setting], findings: Iterable[Finding]) -> list[Setting]:
    """The changes, then those that the findings' remedies stand for."""
    offered = {
        setting
        for finding in findings
        for remedy in finding.remedies
        for setting in settings_for_remedy(remedy.id)
    }
    return [*changes, *sorted(offered.difference(changes), key=str)]


def try_each(
    bench: Bench, settings: Sequence[Setting], history: Sequence[TrackedPromise] = ()
) -> Tried:
    """Predict each change on its own; a defect in one what-if takes nothing from the others."""
    predictions: list[Prediction] = []
    refused: list[str] = []
    pointless: list[Setting] = []
    defects: list[str] = []
    for setting in settings:
        try:
            prediction = adjusted(bench.predict([setting]), history)
        except StepscopeError:
            raise
        except Exception as error:
            if os.environ.get("STEPSCOPE_DEBUG"):
                raise
            defects.append(f"{setting}: a defect in stepscope: {type(error).__name__}: {error}")
            continue
        pointless += prediction.pointless
        if prediction.refused:
            refused += prediction.refused
        else:
            predictions.append(prediction)
    predictions.sort(key=lambda prediction: -prediction.throughput_factor)
    return Tried(
        before=bench.predict([]),
        predictions=tuple(predictions),
        refused=tuple(dict.fromkeys([*refused, *defects])),
        pointless=tuple(pointless),
        defects=tuple(defects),
    )


# Training through a parameter server, as every surface shows it.

VERDICTS: dict[TogetherVerdict, str] = {
    "pays": "it pays",
    "does not pay": "it does not pay",
    "barrier": "all wait for the slowest",
    "one worker": "one worker",
}
# Where a worker's time goes, in the order of a step.
PARTS = {
    "blocked": "blocked",
    "pull": "pull",
    "compute": "own work",
    "push": "push",
    "other": "other code",
}
_MOST_BINS = 12


def together_line(summary: TogetherSummary) -> str:
    """The throughput and what a barrier would have given."""
    rate = f"{significant(summary.updates_per_s)} updates/s with {summary.consistency}"
    if summary.barrier_updates_per_s is None or summary.gain is None:
        return rate
    barrier = significant(summary.barrier_updates_per_s)
    against = f"{barrier} with a barrier at every step ({factor(summary.gain)}x)"
    return f"{rate}, {against}: {VERDICTS[summary.verdict]}"


def histogram_rows(staleness: Staleness) -> list[tuple[str, int]]:
    """Steps behind and how many pulls; neighbours share a row where there are many."""
    counts = staleness.counts
    width = -(-len(counts) // _MOST_BINS)
    rows = []
    for first in range(0, len(counts), width or 1):
        last = min(first + width, len(counts)) - 1
        words = str(first) if first == last else f"{first} to {last}"
        rows.append((words, sum(counts[first : last + 1])))
    return rows


def _mean_part(name: str) -> Callable[[WorkerShare], str]:
    return lambda worker: milliseconds(getattr(worker, f"{name}_ns") / 1e6 / worker.steps)


_WORKER_COLUMNS: tuple[Column[WorkerShare], ...] = (
    Column(">worker", lambda worker: str(worker.worker), ">Worker"),
    Column(">steps", lambda worker: f"{worker.steps:,}"),
    Column(">step", _mean_part("whole")),
    Column(">own work", _mean_part("compute")),
    *(Column(f">{part}", _mean_part(part)) for part in ("blocked", "pull", "push", "other")),
    Column(">sent", lambda worker: size(worker.pushed_bytes), ">Sent"),
    Column(">received", lambda worker: size(worker.pulled_bytes), ">Received"),
    Column(None, lambda worker: str(worker.resent), ">Sent again"),
    Column(">behind", lambda worker: or_dash(worker.mean_gap, significant)),
)
_BLOCK_COLUMNS: tuple[Column[BlockedBy], ...] = (
    Column(">worker", lambda pair: str(pair.worker), ">Worker"),
    Column(">waits for", lambda pair: str(pair.by), ">waits for"),
    Column(
        ">in all",
        lambda pair: milliseconds(pair.blocked_ns / 1e6),
        ">in all",
        lambda pair: duration(pair.blocked_ns),
    ),
    Column(">times", lambda pair: f"{pair.times:,}", ">times"),
)
_SHARD_COLUMNS: tuple[Column[ShardLoad], ...] = (
    Column(">shard", lambda shard: str(shard.shard), ">Shard"),
    Column(">parameters", lambda shard: or_dash(shard.size_bytes, size), ">Parameters"),
    Column(">updates", lambda shard: f"{shard.updates:,}", ">Updates"),
    Column(">pulls", lambda shard: f"{shard.pulls:,}", ">Pulls"),
    Column(">busy", lambda shard: percent(shard.busy_share), ">Busy"),
    Column(">queue", lambda shard: or_dash(shard.mean_queue, significant), ">Queue, mean"),
    Column(">longest", lambda shard: or_dash(shard.largest_queue, str), ">longest"),
    Column(">wait", lambda shard: or_dash(shard.mean_wait_ms, milliseconds), ">Wait in it"),
)


def worker_table(workers: Sequence[WorkerShare]) -> Table[WorkerShare]:
    """The parts of each worker's step; a page draws them as bars."""
    return Table(title="workers, mean step", columns=_WORKER_COLUMNS, rows=workers)


def block_table(pairs: Sequence[BlockedBy]) -> Table[BlockedBy]:
    return Table(title="who waits for whom", columns=_BLOCK_COLUMNS, rows=pairs)


def server_table(shards: Sequence[ShardLoad]) -> Table[ShardLoad]:
    return Table(title="server load", columns=_SHARD_COLUMNS, rows=shards)


def together_json(summary: TogetherSummary) -> dict[str, Any]:
    """`together` of `explain --json`; its notes are among those of the job."""
    answer: dict[str, Any] = to_builtins(summary)
    del answer["notes"]
    return answer | {"gain": summary.gain, "staleness": _staleness_json(summary.staleness)}


def promise_json(promise: ConsistencyPromise | None) -> dict[str, Any] | None:
    """`consistency` of `whatif --json`."""
    if promise is None:
        return None
    return {**to_builtins(promise), "staleness": _staleness_json(promise.staleness)}


def _staleness_json(staleness: Staleness) -> dict[str, Any]:
    names = ("pulls", "mean", "largest", "counts")
    return {name: to_builtins(getattr(staleness, name)) for name in names}


# What-ifs on a run through a parameter server: another consistency.

_USUAL = ("strong", "bounded:1", "bounded:3", "bounded:10", "eventual", "weak:8")


def find_server_runs(paths: Sequence[str], settings: Sequence[Setting]) -> list[Path]:
    """Run folders whose parameter server answers these changes: those that ask for a consistency,
    and all if nothing else was recorded."""
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    runs = [folder for folder in folders if server_file(folder) is not None]
    if not runs or any(setting.name == "consistency" for setting in settings):
        return runs
    files = find_traces(runs[0])
    return runs if all(isinstance(file, Path) and is_server_file(file) for file in files) else []


def predict_server(runs: Sequence[Path], settings: Sequence[Setting]) -> Tried:
    """The consistency asked for, or the usual ones. Raises UsageError for other changes, and
    NotCapturedError for too few workers or steps."""
    from stepscope.predict.declaration import Refused
    from stepscope.predict.parameter_server import ServerRun

    if len(settings) > 1 or any(setting.name != "consistency" for setting in settings):
        raise UsageError(
            f"{runs[0]} trained through a parameter server. Only its consistency can be "
            "changed, and alone, such as --set consistency=bounded:3"
        )
    names = [setting.value for setting in settings] or list(_USUAL)
    wanted = [Consistency.parse(name) for name in names]
    events = read_server_events(runs)
    if events is None:
        raise NotCapturedError(f"{runs[0]}: its parameter server recorded nothing")
    try:
        run = ServerRun(events)
    except Refused as reason:
        raise NotCapturedError(f"{runs[0]}: {reason}") from None
    predictions = [run.predict(consistency) for consistency in wanted]
    best_first = sorted(predictions, key=lambda prediction: -prediction.throughput_factor)
    # What the run itself is simulated to be is moved to what was measured.
    before = run.predict(events.consistency)
    ms = before.baseline_ms
    before = replace(before, settings=(), applied=(), low_ms=ms, high_ms=ms)
    return Tried(before=before, predictions=tuple(best_first), refused=())


def describe_run(tried: Tried, runs: Sequence[Path]) -> str:
    """A headline: which run, how many workers, how long a step is."""
    promise = tried.before.consistency
    workers = counted(promise.workers, "worker") if promise else ""
    consistency = f"{promise.consistency} consistency" if promise else ""
    step = f"{milliseconds(tried.before.baseline_ms)} a step, measured"
    return " · ".join((runs[0].resolve().name, workers, consistency, step))


def describe_rates(tried: Tried) -> str:
    """Updates per second, now and with the best change, and the straggler that decides it."""
    best, now = tried.predictions[0], tried.before.consistency
    promise = best.consistency
    assert promise is not None
    assert now is not None
    rates = f"{significant(now.updates_per_s)} -> {significant(promise.updates_per_s)} updates/s"
    between = f"({significant(promise.low)} to {significant(promise.high)})"
    return f"{rates} {between}: {best.assumptions[0]}"
