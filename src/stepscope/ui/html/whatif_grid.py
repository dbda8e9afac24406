"""Every combination of the changes that this step takes, predicted once for the report's page.

It runs where the trace is. On the page a switch picks a cell; workers, links and buckets are put
into the cell's outline there (whatif_crew.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.predict.optimizer_updates import current_form
from stepscope.predict.whatifs import cuda_graphs, in_order
from stepscope.records.prediction import Setting
from stepscope.ui.html.whatif_axes import Axis, Option
from stepscope.ui.html.whatif_scaling import Sketches, lay_out_crew
from stepscope.ui.whatif import adjusted, try_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.predict.whatif import Bench, Trial
    from stepscope.records.explanation import RankExplanation
    from stepscope.records.prediction import Prediction
    from stepscope.records.promise import TrackedPromise
    from stepscope.ui.html.whatif_scaling import CrewCell, CrewGrid
    from stepscope.ui.whatif import Tried

# Cells and tasks: a cell of a step with a thousand tasks takes some 7 ms, half of it its outline.
MOST_CELLS = 240
_MOST_WORK = 300_000
_BATCHES = ("x0.5", "", "x2", "x4", "x8")
_DIGITS = 5  # significant, in the file
COLUMNS = ("step", "low", "high", "host", "device", "factor", "peak", "peak_low", "peak_high")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfGrid:
    """What the page needs. `cells` holds a column for each number, the last axis runs fastest."""

    path: str
    rank: int | None
    axes: tuple[Axis, ...]
    cells: dict[str, list[float | None]]
    before: Prediction
    singles: tuple[Prediction, ...]
    refused: tuple[str, ...]
    assumptions: dict[str, tuple[str, ...]]
    batch: int | None
    limit_bytes: int | None
    on_host: bool = False  # a CPU alone: nothing but communication runs beside it
    left_out: tuple[str, ...] = ()  # controls that would have been too many
    crew: CrewGrid | None = None
    crew_cells: tuple[CrewCell | None, ...] = ()


def lay_out(
    bench: Bench, tried: Tried, history: Sequence[TrackedPromise], rank: RankExplanation
) -> WhatIfGrid:
    """The controls that this step takes, and every combination of them."""
    singles = {str(each.settings[0]): each for each in tried.predictions}
    wanted = [Setting(name="batch", value=each) for each in _factors(bench) if each]
    wanted.append(Setting(name="checkpoint", value="blocks"))
    untried = [each for each in wanted if str(each) not in singles]
    more = try_each(bench, untried, history).predictions
    known = singles | {str(each.settings[0]): each for each in more}
    axes, left_out = _fitting(_axes(bench, set(known), rank), _work(bench))
    crew = lay_out_crew(bench, history)
    cells, crew_cells = _cells(bench, axes, history, crew)
    return WhatIfGrid(
        path=rank.path,
        rank=rank.rank,
        axes=axes,
        cells=cells,
        before=tried.before,
        singles=tried.predictions,
        refused=tried.refused,
        assumptions={name: each.assumptions for name, each in known.items()},
        batch=bench.context.batch,
        limit_bytes=rank.memory.limit_bytes if rank.memory else None,
        on_host=bench.context.on_host,
        left_out=left_out,
        crew=crew,
        crew_cells=crew_cells,
    )


def _axes(bench: Bench, known: set[str], rank: RankExplanation) -> list[Axis]:
    """The most telling first."""
    dtype = (rank.efficiency.dtype if rank.efficiency else None) or "as it is"
    found = [
        _choice(
            "precision",
            "Precision",
            "What matrix products are computed in; bf16 is autocast",
            [
                Option(label=f"{dtype} (now)" if dtype != "as it is" else dtype, setting=""),
                Option(label="tf32", setting="precision=tf32"),
                Option(label="bf16", setting="precision=bf16"),
            ],
            known,
        ),
        _batch_axis(bench, known),
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
            [
                Option(label=f"{current_form(bench.context) or 'as it is'} (now)", setting=""),
                Option(label="fused", setting="optimizer=fused"),
            ],
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
    return [axis for axis in found if axis is not None]


def _choice(id_: str, label: str, hint: str, options: list[Option], known: set[str]) -> Axis | None:
    there = tuple(each for each in options if not each.setting or each.setting in known)
    if len(there) < 2:
        return None
    return Axis(id=id_, label=label, hint=hint, kind="choice", options=there)


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
    """Half a batch only where that is a whole one."""
    batch = bench.context.batch
    return [each for each in _BATCHES if each != "x0.5" or not batch or batch % 2 == 0]


def _work(bench: Bench) -> int:
    """What a cell costs: its tasks; streams that wait for each other take longer to replay."""
    tasks = bench.context.graph.tasks
    return len(tasks) * (3 if (tasks.after >= 0).any() else 1)


def _fitting(axes: list[Axis], work: int) -> tuple[tuple[Axis, ...], tuple[str, ...]]:
    """As many controls as can be combined in reasonable time; the page keeps their order."""
    most = min(MOST_CELLS, max(2, _MOST_WORK // max(work, 1)))
    kept, left_out, cells = [], [], 1
    for axis in axes:
        if cells * len(axis.options) <= most:
            kept.append(axis)
            cells *= len(axis.options)
        else:
            left_out.append(axis.label)
    return tuple(kept), tuple(left_out)


def _cells(
    bench: Bench, axes: tuple[Axis, ...], history: Sequence[TrackedPromise], crew: CrewGrid
) -> tuple[dict[str, list[float | None]], tuple[CrewCell | None, ...]]:
    """What combinations share is predicted once: they are a tree. A CUDA graph is made last."""
    order = _order(axes)
    found: dict[int, tuple[float | None, ...]] = {}
    crews: dict[int, CrewCell | None] = {}
    sketches = Sketches(crew.crew) if crew.crew else None
    strides = [math.prod(len(axis.options) for axis in axes[i + 1 :]) for i in range(len(axes))]

    def grow(
        trial: Trial, local: Trial, settings: tuple[Setting, ...], level: int, cell: int
    ) -> None:
        if level == len(order):
            found[cell] = _numbers(adjusted(bench.conclude(trial, settings), history))
            crews[cell] = None
            if sketches and not trial.refused:
                graphed = trial is not local
                spread = cuda_graphs.apply(local.context, "").spread if graphed else 0.0
                crews[cell] = sketches.cell_of(local, settings, spread, graphed=graphed)
            return
        place = order[level]
        for number, option in enumerate(axes[place].options):
            after, said = trial, settings
            if option.setting:
                setting = _setting(option.setting)
                after, said = bench.change(trial, setting), (*settings, setting)
            single = trial if option.setting == "cuda-graphs" else after
            grow(after, single, said, level + 1, cell + number * strides[place])

    start = bench.begin()
    grow(start, start, (), 0, 0)
    cells = {
        name: [found[cell][column] for cell in range(len(found))]
        for column, name in enumerate(COLUMNS)
    }
    return cells, tuple(crews[cell] for cell in range(len(crews)))


def _order(axes: tuple[Axis, ...]) -> list[int]:
    """In which order the axes' changes are made."""
    named = {str(each): i for i, axis in enumerate(axes) for each in [_setting(_any(axis))]}
    return [named[str(setting)] for setting in in_order(_setting(name) for name in named)]


def _any(axis: Axis) -> str:
    return next(option.setting for option in axis.options if option.setting)


def _setting(text: str) -> Setting:
    name, _, value = text.partition("=")
    return Setting(name=name, value=value)


def _numbers(prediction: Prediction) -> tuple[float | None, ...]:
    """A cell; all of it is missing where one of the changes refused beside the others."""
    if prediction.refused:
        return (None,) * len(COLUMNS)
    found = (
        prediction.predicted_ms,
        prediction.low_ms,
        prediction.high_ms,
        prediction.host_ms,
        prediction.device_ms,
        prediction.throughput_factor,
        prediction.peak_bytes,
        prediction.peak_low_bytes,
        prediction.peak_high_bytes,
    )
    return tuple(None if value is None else float(f"{value:.{_DIGITS}g}") for value in found)
