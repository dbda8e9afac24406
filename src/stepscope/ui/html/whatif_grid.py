"""Every combination of the changes that suit this step, predicted once for the report.

It runs where the trace is. On the page a control picks a cell; workers, links and buckets are added
to the cell's step there (whatif_scaling.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.predict.compare_gpus import compare_gpus, table_gpus
from stepscope.predict.optimizer_updates import current_form
from stepscope.predict.outcome import Refused
from stepscope.predict.whatifs import cuda_graphs, in_order
from stepscope.records.prediction import Setting
from stepscope.ui.html.whatif_axes import Axis, Option
from stepscope.ui.html.whatif_scaling import ScalingCells, find_scaling
from stepscope.ui.whatif import adjusted, try_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.predict.whatif import Bench, Trial
    from stepscope.records.explanation import RankExplanation
    from stepscope.records.gpu_comparison import GpuComparison
    from stepscope.records.prediction import Prediction
    from stepscope.records.promise import TrackedPromise
    from stepscope.ui.html.whatif_scaling import Scaling, ScalingCell
    from stepscope.ui.whatif import Tried

# A cell of a step with a thousand tasks takes some 7 ms.
MOST_CELLS = 240
_MOST_WORK = 300_000  # tasks in all cells
_MOST_GPU_WORK = 3_000_000  # calls and tasks on all GPUs
_BATCHES = ("x0.5", "", "x2", "x4", "x8")
_DIGITS = 5  # significant digits in the file
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfGrid:
    """What the pane needs. `cells` has one column per number; the last axis runs fastest."""

    path: str
    rank: int | None
    axes: tuple[Axis, ...]
    cells: dict[str, list[float | None]]
    before: Prediction
    singles: tuple[Prediction, ...]
    refused: tuple[str, ...]
    assumptions: dict[str, tuple[str, ...]]
    batch: int | None
    samples: int | None  # of a step: several batches where gradients accumulate
    limit_bytes: int | None
    on_host: bool = False  # CPU only: nothing but communication runs next to the host
    left_out: tuple[str, ...] = ()  # controls that would make too many combinations
    scaling: Scaling | None = None
    scaling_cells: tuple[ScalingCell | None, ...] = ()
    gpus: GpuComparison | None = None  # None if the step's own GPU is not known


def lay_out(
    bench: Bench, tried: Tried, history: Sequence[TrackedPromise], rank: RankExplanation
) -> WhatIfGrid:
    """The controls that suit this step, and every combination of them."""
    singles = {str(single.settings[0]): single for single in tried.predictions}
    wanted = [Setting(name="batch", value=factor) for factor in _factors(bench) if factor]
    wanted.append(Setting(name="checkpoint", value="blocks"))
    untried = [setting for setting in wanted if str(setting) not in singles]
    more = try_each(bench, untried, history).predictions
    known = singles | {str(single.settings[0]): single for single in more}
    axes, left_out = _fitting(_axes(bench, set(known), rank), _work(bench))
    scaling = find_scaling(bench, history)
    cells, scaling_cells = _cells(bench, axes, history, scaling)
    return WhatIfGrid(
        path=rank.path,
        rank=rank.rank,
        axes=axes,
        cells=cells,
        before=tried.before,
        singles=tried.predictions,
        refused=tried.refused,
        assumptions={name: single.assumptions for name, single in known.items()},
        batch=bench.context.batch,
        samples=bench.context.samples,
        limit_bytes=rank.memory.limit_bytes if rank.memory else None,
        on_host=bench.context.on_host,
        left_out=left_out,
        scaling=scaling,
        scaling_cells=scaling_cells,
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
    dtype = (rank.efficiency.dtype if rank.efficiency else None) or "as it is"
    now = current_form(bench.context) or "as it is"
    axes = [
        _choice(
            "precision",
            "Precision",
            "What matrix products are computed in; bf16 is autocast",
            f"{dtype} (now)" if dtype != "as it is" else dtype,
            ("tf32", "bf16"),
            known,
        ),
        _batch_axis(bench, known),
        _switch("no-stalls", "No stalls", "Every step is a typical one", known),
        _switch("cuda-graphs", "CUDA graphs", "The whole step launched at once", known),
        _switch(
            "compile",
            "torch.compile",
            "A guess between bounds: what will be fused is not known",
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
        _switch("no-data-wait", "Data always ready", "Batches wait for the step", known),
        _switch("no-sync", "No blocking calls", "No .item(), .cpu() or synchronize", known),
        _switch(
            "checkpoint=none", "No checkpointing", "Nothing is computed twice; more memory", known
        ),
        _switch(
            "checkpoint=blocks",
            "Checkpoint blocks",
            "Forward runs again inside backward: less memory, more time",
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
    hint = "Samples of one step" if batch else "Samples of one step, as a multiple of now"
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


def _cells(
    bench: Bench, axes: tuple[Axis, ...], history: Sequence[TrackedPromise], scaling: Scaling
) -> tuple[dict[str, list[float | None]], tuple[ScalingCell | None, ...]]:
    """Combinations are a tree: what they share is predicted once. A CUDA graph comes last."""
    order = _order(axes)
    numbers: dict[int, tuple[float | None, ...]] = {}
    scaling_cells: dict[int, ScalingCell | None] = {}
    scaled = ScalingCells(scaling.setup) if scaling.setup else None
    strides = [math.prod(len(axis.options) for axis in axes[i + 1 :]) for i in range(len(axes))]

    def grow(
        trial: Trial, local: Trial, settings: tuple[Setting, ...], level: int, cell: int
    ) -> None:
        if level == len(order):
            numbers[cell] = _numbers(adjusted(bench.conclude(trial, settings), history))
            scaling_cells[cell] = None
            if scaled and not trial.refused:
                graphed = trial is not local
                spread = cuda_graphs.apply(local.context, "").spread if graphed else 0.0
                scaling_cells[cell] = scaled.make_cell(local, settings, spread, graphed=graphed)
            return
        place = order[level]
        for number, option in enumerate(axes[place].options):
            after, chosen = trial, settings
            if option.setting:
                setting = Setting.parse(option.setting)
                after, chosen = bench.change(trial, setting), (*settings, setting)
            ungraphed = trial if option.setting == "cuda-graphs" else after
            grow(after, ungraphed, chosen, level + 1, cell + number * strides[place])

    start = bench.begin()
    grow(start, start, (), 0, 0)
    cells = {
        name: [numbers[cell][column] for cell in range(len(numbers))]
        for column, name in enumerate(COLUMNS)
    }
    return cells, tuple(scaling_cells[cell] for cell in range(len(scaling_cells)))


def _order(axes: tuple[Axis, ...]) -> list[int]:
    """The order in which the axes' changes are made."""
    named = {str(Setting.parse(_any(axis))): place for place, axis in enumerate(axes)}
    return [named[str(setting)] for setting in in_order(Setting.parse(name) for name in named)]


def _any(axis: Axis) -> str:
    return next(option.setting for option in axis.options if option.setting)


def _numbers(prediction: Prediction) -> tuple[float | None, ...]:
    """A cell; all of it is missing where one of the changes does not go with the others."""
    if prediction.refused:
        return (None,) * len(COLUMNS)
    numbers = (getattr(prediction, field) for field in COLUMNS.values())
    return tuple(None if value is None else float(f"{value:.{_DIGITS}g}") for value in numbers)
