"""Lay out the controls of the pane "What if" and predict their positions, where the trace
is, by what `whatif` itself uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from stepscope.predict.declaration import Refused
from stepscope.predict.engine import Bench, Trial
from stepscope.predict.other_gpu.step import compare_gpus, table_gpus
from stepscope.predict.scale_out import find_present_exchange, step_without_comm_ns
from stepscope.predict.step_context import Exchange, StepContext, current_form
from stepscope.predict.whatifs import in_order, parse_setting
from stepscope.records.explanation import RankExplanation
from stepscope.records.prediction import GpuComparison, Prediction, Setting, TrackedPromise
from stepscope.step.replay import step_ns
from stepscope.step.work import Kind
from stepscope.ui.topics.whatif import Tried, adjusted, try_each

if TYPE_CHECKING:
    Places = tuple[int, ...]

# Changes of the step are combined in every way. Workers, links and buckets are combined with each
# other, and with one other change, as far as that takes reasonable time: the page shows no number
# for a position that was not predicted.

# A cell of a step with a thousand tasks takes some 7 ms.
MOST_CELLS = 240
_MOST_WORK = 300_000  # tasks in all cells
_SCALED_WORK = 60_000  # the same for workers and links, which take three times as long
_LEAST_TASKS = 400  # that a position of theirs counts for
_MOST_GPU_WORK = 3_000_000  # calls and tasks on all GPUs
_BATCHES = ("x0.5", "", "x2", "x4", "x8")
# A number's name on the page, and in a prediction.
COLUMNS = {
    "step": "predicted_ms",
    "low": "low_ms",
    "high": "high_ms",
    "stalls": "stall_ms",
    "host": "host_ms",
    "device": "device_ms",
    "factor": "throughput_factor",
    "peak": "peak_bytes",
    "peak_low": "peak_low_bytes",
    "peak_high": "peak_high_bytes",
}
_LINKS = ("comm", "exposed")  # ms of all collectives, and what they add to the step


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfGrid:
    """What the pane needs. `cells` has one column per number and one row per predicted position."""

    paths: tuple[str, ...]  # that `whatif` is asked about
    rank: int | None
    axes: tuple[Axis, ...]
    scaling_axes: tuple[Axis, ...]
    positions: tuple[Places, ...]  # those of `axes` first; the last control runs fastest
    cells: dict[str, list[float | None]]
    # Of each position, what its prediction assumes; where there is none, why.
    assumptions: tuple[tuple[str, ...], ...]
    before: Prediction
    workers: int  # now
    singles: tuple[Prediction, ...]
    refused: tuple[str, ...]
    batch: int | None
    samples: int | None  # of a step: several batches where gradients accumulate
    limit_bytes: int | None
    on_host: bool = False  # CPU only: nothing but communication runs next to the host
    left_out: tuple[str, ...] = ()  # controls that would make too many combinations
    gpus: GpuComparison | None = None  # None if the step's own GPU is not known

    @property
    def has_links(self) -> bool:
        return any(not axis.why for axis in self.scaling_axes)


def lay_out(
    bench: Bench,
    tried: Tried,
    history: Sequence[TrackedPromise],
    rank: RankExplanation,
    paths: Sequence[str] = (),
) -> WhatIfGrid:
    """The controls that suit this step, and what becomes of it at their positions.

    `paths` are the job's: the other ranks' traces say how long workers wait for each other.
    """
    singles = {str(single.settings[0]): single for single in tried.predictions}
    wanted = [Setting(name="batch", value=factor) for factor in _factors(bench) if factor]
    wanted.append(Setting(name="checkpoint", value="blocks"))
    untried = [setting for setting in wanted if str(setting) not in singles]
    more = try_each(bench, untried, history).predictions
    known = set(singles) | {str(single.settings[0]) for single in more}
    axes, left_out = _fitting(_axes(bench, known, rank), _work(bench))
    trials = Trials(bench)
    scaling_axes = find_scaling_axes(trials)
    positions = _find_positions(axes, scaling_axes, len(bench.context.graph.tasks))
    cells, assumptions = _predict(trials, (*axes, *scaling_axes), positions, history)
    traced = find_present_exchange(bench.context)
    return WhatIfGrid(
        paths=tuple(paths) or (rank.path,),
        rank=rank.rank,
        axes=axes,
        scaling_axes=scaling_axes,
        positions=positions,
        cells=cells,
        assumptions=assumptions,
        before=tried.before,
        workers=traced.ranks if traced else 1,
        singles=tried.predictions,
        refused=tried.refused,
        batch=bench.context.batch,
        samples=bench.context.samples,
        limit_bytes=rank.memory.limit_bytes if rank.memory else None,
        on_host=bench.context.on_host,
        left_out=left_out,
        gpus=_compare_gpus(bench),
    )


def _compare_gpus(bench: Bench) -> GpuComparison | None:
    """The step on every GPU of the table, unless replaying it that often takes too long."""
    gpus = table_gpus()
    if len(gpus) * bench.context.graph.size > _MOST_GPU_WORK:
        return None
    try:
        return compare_gpus(bench, gpus)
    except Refused:
        return None


def _axes(bench: Bench, known: set[str], rank: RankExplanation) -> list[Axis]:
    """The most useful first."""
    dtype = (rank.efficiency.dtype if rank.efficiency else None) or "unchanged"
    now = current_form(bench.context) or "unchanged"
    axes = [
        _choice(
            "precision",
            "Precision",
            "The dtype of matmuls. bf16 is autocast",
            f"{dtype} (now)" if dtype != "unchanged" else dtype,
            ("tf32", "bf16"),
            known,
        ),
        _batch_axis(bench, known),
        _switch("no-stalls", "No stalls", "Every step is a typical one", known),
        _switch("cuda-graphs", "CUDA graphs", "The whole step is launched at once", known),
        _switch(
            "compile",
            "torch.compile",
            "An estimate: what torch.compile will fuse is unknown",
            known,
        ),
        _choice(
            "optimizer",
            "Optimizer",
            "The same update with fewer launches",
            f"{now} (now)",
            ("fused",),
            known,
        ),
        _switch("no-data-wait", "Data always ready", "Every batch is ready in time", known),
        _switch("no-sync", "No blocking calls", "No .item(), .cpu() or synchronize", known),
        _switch(
            "checkpoint=none", "No checkpointing", "Nothing is recomputed. Needs more memory", known
        ),
        _switch(
            "checkpoint=blocks",
            "Checkpoint blocks",
            "Forward runs again during backward: less memory, more time",
            known,
        ),
    ]
    return [axis for axis in axes if axis is not None]


def _choice(
    id_: str, label: str, hint: str, now: str, values: Sequence[str], known: set[str]
) -> Axis | None:
    offered = [Option(label=value, setting=f"{id_}={value}") for value in values]
    options = [Option(label=now, setting=""), *(o for o in offered if o.setting in known)]
    if len(options) < 2:
        return None
    return Axis(id=id_, label=label, hint=hint, kind="choice", options=tuple(options))


def _switch(setting: str, label: str, hint: str, known: set[str]) -> Axis | None:
    if setting not in known:
        return None
    options = (Option(label="off", setting=""), Option(label="on", setting=setting))
    return Axis(
        id=setting.replace("=", "-"), label=label, hint=hint, kind="switch", options=options
    )


def _batch_axis(bench: Bench, known: set[str]) -> Axis | None:
    batch = bench.context.batch
    options = []
    for factor in _factors(bench):
        setting = f"batch={factor}" if factor else ""
        if setting and setting not in known:
            continue
        times = float(factor[1:]) if factor else 1.0
        name = f"{round(batch * times):,}" if batch else f"{times:g}×"
        options.append(Option(label=f"{name} (now)" if not factor else name, setting=setting))
    if len(options) < 2:
        return None
    hint = (
        "Samples of one step"
        if batch
        else "Samples of one step, as a multiple of the current number"
    )
    return Axis(id="batch", label="Batch", hint=hint, kind="slider", options=tuple(options))


def _factors(bench: Bench) -> list[str]:
    """Half a batch only where that is a whole number of samples."""
    batch = bench.context.batch
    return [factor for factor in _BATCHES if factor != "x0.5" or not batch or batch % 2 == 0]


def _work(bench: Bench) -> int:
    """What a cell costs, in tasks; streams that wait for each other take longer to replay."""
    tasks = bench.context.graph.tasks
    return len(tasks) * (3 if (tasks.after >= 0).any() else 1)


def _fitting(axes: list[Axis], work: int) -> tuple[tuple[Axis, ...], tuple[str, ...]]:
    """As many controls as can be combined in reasonable time; the page keeps their order."""
    most = min(MOST_CELLS, max(2, _MOST_WORK // max(work, 1)))
    fitting, left_out, cells = [], [], 1
    for axis in axes:
        if cells * len(axis.options) <= most:
            fitting.append(axis)
            cells *= len(axis.options)
        else:
            left_out.append(axis.label)
    return tuple(fitting), tuple(left_out)


# Positions, and what is predicted of them


def settings_at(axes: Sequence[Axis], places: Places) -> list[Setting]:
    """The changes that these places ask for."""
    chosen = {
        axis.id: axis.options[place].setting for axis, place in zip(axes, places, strict=True)
    }
    if chosen.pop("share", "") and chosen["workers"]:
        chosen["workers"] += ":strong"
    return [Setting.parse(setting) for setting in chosen.values() if setting]


def _find_positions(
    axes: Sequence[Axis], scaling_axes: tuple[Axis, Axis, Axis, Axis], tasks: int
) -> tuple[Places, ...]:
    """Every combination of `axes`; then those of workers and links, the most useful first."""
    unscaled = tuple(axis.now for axis in scaling_axes)
    combined = [(*local, *unscaled) for local in itertools.product(*map(_places, axes))]
    found = dict.fromkeys(combined)
    left = _SCALED_WORK // max(_LEAST_TASKS, tasks)
    for scaled in _scaled_positions(axes, scaling_axes):
        new = [places for places in scaled if places not in found]
        if len(new) > left:
            break
        left -= len(new)
        found |= dict.fromkeys(new)
    return tuple(found)


def _scaled_positions(
    axes: Sequence[Axis], scaling_axes: tuple[Axis, Axis, Axis, Axis]
) -> Iterator[list[Places]]:
    """Groups that the page has as a whole or not at all."""
    workers, share, bandwidth, buckets = scaling_axes
    now = tuple(axis.now for axis in axes)
    w, _, b, m = (axis.now for axis in scaling_axes)
    shares = _places(share) if not share.why else range(1)
    # One worker alone has nobody to exchange with.
    linked = [i for i in _places(workers) if workers.options[i].label.split()[0] != "1"]
    links = [(b, m), *((i, m) for i in _moved(bandwidth)), *((b, i) for i in _moved(buckets))]
    alone = [(i, 0, b, m) for i in _moved(workers)]
    alone += [(w, 0, *link) for link in links[1:] if w in linked]
    shared = [(i, k, b, m) for i in _moved(workers) for k in shares]
    one_else = [(*now[:i], k, *now[i + 1 :]) for i, axis in enumerate(axes) for k in _moved(axis)]
    yield [(*now, *scaled) for scaled in (*alone, *shared)]
    yield [(*now, i, 0, *link) for i in linked for link in links]
    yield [(*local, *scaled) for local in one_else for scaled in alone]
    every = itertools.product(linked, shares, _places(bandwidth), _places(buckets))
    yield [(*now, i, k, *link) for i, k, *link in every if i != w or not k]


def _places(axis: Axis) -> range:
    return range(len(axis.options))


def _moved(axis: Axis) -> list[int]:
    return [place for place in _places(axis) if place != axis.now]


def _predict(
    trials: Trials,
    axes: Sequence[Axis],
    positions: Sequence[Places],
    history: Sequence[TrackedPromise],
) -> tuple[dict[str, list[float | None]], tuple[tuple[str, ...], ...]]:
    """Columns of numbers and each position's assumptions. Neighbours share most changes."""
    wanted = {places: in_order(settings_at(axes, places)) for places in positions}
    numbers: dict[Places, tuple[float | None, ...]] = {}
    lines: dict[Places, tuple[str, ...]] = {}
    for places in sorted(positions, key=lambda places: [*map(str, wanted[places])]):
        trial = trials.make(wanted[places])
        prediction = adjusted(trials.bench.conclude(trial, wanted[places]), history)
        if prediction.refused:  # all of a position is missing if one change refuses
            numbers[places] = (None,) * len((*COLUMNS, *_LINKS))
            lines[places] = prediction.refused[-1:]
            continue
        known = [getattr(prediction, field) for field in COLUMNS.values()]
        numbers[places] = (*known, *_communication(trial.context))
        lines[places] = prediction.assumptions
    columns = {
        name: [numbers[places][column] for places in positions]
        for column, name in enumerate((*COLUMNS, *_LINKS))
    }
    return columns, tuple(lines[places] for places in positions)


def _communication(context: StepContext) -> tuple[float, float]:
    """ms of all collectives and of what they add to the step, planned or as traced."""
    if context.exchange is not None:
        return context.exchange.comm_ns / 1e6, context.exchange.exposed_ns / 1e6
    tasks = context.graph.tasks
    comm_ns = float(tasks.dur_ns[tasks.kind == Kind.COMM].sum())
    added_ns = step_ns(context.graph) - step_without_comm_ns(context.graph) if comm_ns else 0.0
    return comm_ns / 1e6, max(0.0, added_ns) / 1e6


# A control of the pane "What if" and its positions.


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A position of a control; an empty setting leaves the step as it is."""

    label: str
    setting: str

    @property
    def tick(self) -> str:
        """The label, short enough to stand under an axis."""
        words = self.label.removesuffix(" (now)").removesuffix(" MiB")
        return "traced" if words == "as traced" else words


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A control: a choice, a switch (two options, the first is now) or a slider."""

    id: str
    label: str
    hint: str
    kind: str
    options: tuple[Option, ...]
    why: str = ""  # the reason where it cannot be moved

    @property
    def now(self) -> int:
        """The option that changes nothing."""
        return next(i for i, option in enumerate(self.options) if not option.setting)


# Controls of workers, links and buckets: each has the positions that `whatif` can predict.

WORKERS = (1, 2, 4, 8, 16, 64, 256)
BANDWIDTHS = (0.25, 0.5, 2.0, 4.0)
BUCKETS_MB = (1, 5, 25, 100)
_NAMES = {0.25: "¼×", 0.5: "½×"}
_USUAL_MB = 25  # DDP's own bucket_cap_mb


def find_scaling_axes(trials: Trials) -> tuple[Axis, Axis, Axis, Axis]:
    """Workers, their batch, bandwidth and buckets; a control that cannot be moved says why."""
    traced = find_present_exchange(trials.bench.context)
    before = traced.ranks if traced else 1
    many = [f"workers={count}" for count in WORKERS if count != before]
    known, refusal = _try(trials, many)
    workers = _workers(before, [setting for setting in many if setting in known], refusal)
    several = [setting for setting in known if setting != "workers=1"]
    why = "" if before > 1 or several else workers.why or refusal
    # One worker has no links: they are tried with more.
    beside = [] if before > 1 else several[:1]
    return (
        workers,
        _share(trials, known, workers.why),
        _bandwidth(trials, beside, why),
        _buckets(trials, beside, why, is_traced=traced is not None),
    )


def _try(
    trials: Trials, settings: Iterable[str], beside: Sequence[str] = ()
) -> tuple[dict[str, Exchange | None], str]:
    """What each makes of the exchange, without those that refuse; and the first refusal."""
    known: dict[str, Exchange | None] = {}
    refusal = ""
    for setting in settings:
        trial = trials.make(parse_setting(each) for each in (*beside, setting))
        if trial.refused:
            refusal = refusal or trial.refused[-1].removeprefix(f"{setting}: ")
        else:
            known[setting] = trial.context.exchange
    return known, refusal


def _workers(before: int, known: Sequence[str], refusal: str) -> Axis:
    counts = sorted({before, *(int(setting.partition("=")[2]) for setting in known)})
    options = (
        Option(label=f"{count:,} (now)", setting="")
        if count == before
        else Option(label=f"{count:,}", setting=f"workers={count}")
        for count in counts
    )
    hint = "Data-parallel (DDP) workers"
    return _slider("workers", "Workers", hint, options, "" if known else refusal)


def _slider(id_: str, label: str, hint: str, options: Iterable[Option], why: str) -> Axis:
    return Axis(id=id_, label=label, hint=hint, kind="slider", options=tuple(options), why=why)


def _share(trials: Trials, known: Iterable[str], why: str) -> Axis:
    """A part of the setting of workers: workers=8:strong."""
    if not why:
        shared, refusal = _try(trials, [f"{setting}:strong" for setting in known])
        why = "" if shared else refusal
    own, shared_batch = (
        Option(label="each its own", setting=""),
        Option(label="shared", setting="strong"),
    )
    return Axis(
        id="share",
        label="Their batch",
        hint="Each worker keeps the batch (weak scaling), or they share it (strong)",
        kind="choice",
        options=(own, shared_batch),
        why=why,
    )


def _bandwidth(trials: Trials, beside: Sequence[str], why: str) -> Axis:
    names = {f"bandwidth={factor:g}": _NAMES.get(factor, f"{factor:g}×") for factor in BANDWIDTHS}
    known, refusal = ({}, why) if why else _try(trials, names, beside)
    options = [Option(label=names[setting], setting=setting) for setting in known]
    slower = sum(setting < "bandwidth=1" for setting in known)
    options.insert(slower, Option(label="1× (now)", setting=""))
    hint = "Bytes per second between workers"
    return _slider("bandwidth", "Link bandwidth", hint, options, "" if known else refusal)


def _buckets(trials: Trials, beside: Sequence[str], why: str, *, is_traced: bool) -> Axis:
    """Sizes that make the same buckets as a smaller one, or as now, are left out."""
    now_mb = 0 if is_traced else _USUAL_MB
    settings = [f"bucket-mb={size}" for size in BUCKETS_MB if size != now_mb]
    known, refusal = ({}, why) if why else _try(trials, settings, beside)
    now = trials.make(map(parse_setting, beside)).context.exchange
    made = {(now.buckets, now.comm_ns)} if now else set()
    different = []
    for setting, exchange in known.items():
        if exchange and (exchange.buckets, exchange.comm_ns) not in made:
            made.add((exchange.buckets, exchange.comm_ns))
            different.append(setting)
    sizes = sorted({now_mb, *(int(setting.partition("=")[2]) for setting in different)})
    label = "as traced (now)" if is_traced else f"{_USUAL_MB} MiB (now)"
    options = (
        Option(label=f"{size} MiB", setting=f"bucket-mb={size}")
        if size != now_mb
        else Option(label=label, setting="")
        for size in sizes
    )
    refusal = refusal or "All sizes give the same buckets"
    return _slider(
        "bucket-mb", "Bucket size", "DDP's bucket_cap_mb", options, "" if different else refusal
    )


# Changes made to a step one after the other, as `whatif` makes them.

_KEPT = 64  # trials, each with its own graph


class Trials:
    """The trial of every combination; what combinations share is predicted once."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._trial = lru_cache(maxsize=_KEPT)(self._change)

    def make(self, settings: Iterable[Setting]) -> Trial:
        """One that refuses a change is left as it was before it."""
        return self._trial(tuple(in_order(settings)))

    def _change(self, ordered: tuple[Setting, ...]) -> Trial:
        if not ordered:
            return self.bench.begin()
        trial = self._trial(ordered[:-1])
        return trial if trial.refused else self.bench.change(trial, ordered[-1])
