"""loader-workers=N: the DataLoader has N worker processes, or none (0)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.schedule import step_ns
from stepscope.predict.data_waits import without_waits
from stepscope.predict.declaration import ApplyStage, WhatIf
from stepscope.predict.loader_model import LoaderCosts, LoaderStep, predict_workers, read_costs
from stepscope.predict.outcome import NothingToChange, Outcome, Refused, WrongValue, changed
from stepscope.records.figures import milliseconds, significant
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import StepGraph
    from stepscope.predict.step_context import StepContext
    from stepscope.records.loader_use import LoaderUse

_MOST = 1024
_TRIES = 6  # to find the gap that gives the step its length
_CLOSE = 0.001
_SEVERAL = 1.25  # batches per step: below this a step has one


def apply(context: StepContext, value: str) -> Outcome:
    """Refuses a trace without a captured loader, and a number that the loader has already."""
    workers = _count(value)
    loader = _loader(context, workers)
    costs, bare, stalls_ns = _read(context, loader)
    step = predict_workers(costs, workers, step_ns(context.graph) + context.stalls_ns)
    stalls = context.stalls.without(("data",)) if context.stalls else None
    graph = _with_length(bare, max(1.0, step.step_ns - stalls_ns))
    return Outcome(
        context=replace(changed(context, graph), stalls=stalls),
        assumptions=tuple(_assumptions(loader, costs, step, workers)),
        spread=0.0,
        doubt=step.doubt,
        doubt_is_whole=True,
    )


def _count(value: str) -> int:
    count = int(value) if value.isdecimal() and len(value) <= len(str(_MOST)) else _MOST + 1
    if count > _MOST:
        raise WrongValue(f"loader-workers={value}: give their number, such as 2, or 0 for none")
    return count


def _loader(context: StepContext, workers: int) -> LoaderUse:
    loader = context.analysis.inputs.loader
    if loader is None:
        raise Refused(
            "loader-workers: no DataLoader that feeds the training was captured. `stepscope "
            "run` captures it"
        )
    if loader.workers == workers:
        has = counted(workers, "worker") if workers else "no workers"
        raise NothingToChange(f"loader-workers={workers}: the DataLoader has {has} already")
    if loader.iterable and workers > max(1, loader.workers) and loader.workers < 2:
        raise Refused(
            f"loader-workers={workers}: {loader.dataset or 'the dataset'} is an "
            "IterableDataset. Every worker would yield all of it unless it takes its share "
            "(get_worker_info)"
        )
    return loader


def _read(context: StepContext, loader: LoaderUse) -> tuple[LoaderCosts, StepGraph, float]:
    """The costs, the typical step without data, and the stalls that are left of a mean step."""
    bare, saved_ns, _ = without_waits(context)
    stalls = context.stalls
    stalled_ns = stalls.cost_ns.get("data", 0.0) if stalls else 0.0
    data_ns = max(0.0, saved_ns) + stalled_ns
    whole_ns = step_ns(context.graph) + context.stalls_ns
    left_ns = context.stalls_ns - stalled_ns
    run = context.analysis.run
    inputs = context.analysis.inputs
    batches = loader.batches / run.steps if run and run.steps else 1.0
    host_ns = bare.host_ns + left_ns if context.on_host else float(bare.host_ns)
    costs = read_costs(
        loader,
        inputs.folder.data.passing if inputs.folder and inputs.folder.data else None,
        inputs.host_load,
        step_ns=whole_ns,
        data_ns=data_ns,
        host_ns=host_ns,
        batches=batches if batches >= _SEVERAL else 1.0,
    )
    if costs is None:
        raise Refused("loader-workers: too few batches were counted to know what one costs")
    return costs, bare, left_ns


def _with_length(graph: StepGraph, target_ns: float) -> StepGraph:
    """Lengthen the gap before the first call until the step takes so long; a step that is longer
    without any data keeps its length, unless workers made its own work longer."""
    calls = graph.calls
    if not len(calls):
        return graph
    length = step_ns(graph)
    if target_ns < length:
        return _scaled(graph, target_ns / length)
    longer = graph
    gap_ns = 0.0
    for _ in range(_TRIES):
        short_ns = target_ns - step_ns(longer)
        if short_ns <= _CLOSE * target_ns:
            break
        gap_ns += short_ns
        gaps = np.array(calls.gap_ns, np.float64)
        gaps[0] += gap_ns
        longer = replace(graph, calls=replace(calls, gap_ns=gaps))
    return longer


def _scaled(graph: StepGraph, factor: float) -> StepGraph:
    """The host's own time shrinks: workers had slowed it down."""
    from stepscope.explain.replay.measured import scale_host

    return scale_host(graph, factor)


def _assumptions(
    loader: LoaderUse, costs: LoaderCosts, step: LoaderStep, workers: int
) -> list[str]:
    """What the number of workers follows from."""
    made = f"making a step's batch takes {milliseconds(costs.make_ns / 1e6)}"
    if costs.idle_ns > 0.1 * costs.make_ns:
        made += f" ({milliseconds(costs.idle_ns / 1e6)} of it waits)"
    if not workers:
        return [f"{made}, in the training thread"]
    lines = [
        f"{made} in a worker. Receiving it takes {milliseconds(step.passing_ns / 1e6)} "
        "of the training thread"
    ]
    if step.crowd_ns >= max(step.thread_ns, step.making_ns):
        cores = significant(costs.cores)
        lines.append(f"training and {counted(workers, 'worker')} share {cores} free cores")
    if step.epoch_ns > 0.02 * step.step_ns:
        lines.append(
            f"starting workers for each epoch of {round(costs.epoch_steps or 0)} steps adds "
            f"{milliseconds(step.epoch_ns / 1e6)} to a step"
        )
    if costs.passing_doubt > 0.5:
        lines.append("the cost of passing a batch was not measured on this machine")
    if loader.iterable and workers:
        lines.append("the dataset is iterable only, so each worker must take its share of it")
    return lines


def _label(value: str) -> str:
    if value == "0":
        return "no loader workers"
    return f"{counted(int(value), 'loader worker')}" if value.isdecimal() else "loader workers"


WHATIF = WhatIf(
    name="loader-workers",
    help="N worker processes of the DataLoader (0: the training thread makes its batches)",
    label=_label,
    stage=ApplyStage.STOP_WAITING,
    apply=apply,
    keeps_peak=True,
    needs_ceilings=False,
    remedies={"loader-workers": ("0", "1", "2", "4")},
)
