"""One changed step as scaling needs it: its tables between the moments of the exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.work import Kind
from stepscope.predict.buckets import find_gradients
from stepscope.predict.exchange import find_layout, first_forward_call, remove_traced
from stepscope.predict.max_plus import add_slope, split_launch, tabulate_step
from stepscope.predict.outcome import changed
from stepscope.predict.scale_out import find_link_times, step_without_comm_ns
from stepscope.predict.slowest_worker import slow_down
from stepscope.predict.traced_exchange import find_traced_exchange, split_waiting
from stepscope.predict.whatifs import cuda_graphs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.replay.graph import StepGraph
    from stepscope.predict.max_plus import StepTables
    from stepscope.predict.scaling_grid import ScalingSetup
    from stepscope.predict.step_context import StepContext
    from stepscope.predict.traced_exchange import TracedExchange


class ContractedStep(msgspec.Struct, frozen=True, kw_only=True):
    planned: StepTables | None  # the exchange is still to be put in
    traced: StepTables | None  # the exchange is there; its durations are not set
    compute: int  # which of the times is the compute stream's
    waiting_ns: float = 0.0  # inside the traced exchange, for other ranks
    wait_ns: tuple[float, ...] = ()  # the same by collective
    share: tuple[float, ...] = ()  # of the expected transfer that each took
    silent_ns: float = 0.0  # the traced step if no collective took any time
    quiet_ns: float | None = None  # the same with other buckets, if other collectives remain
    task_ns: float | None = None  # inside a CUDA graph: the host's time per added task


def contract_step(
    setup: ScalingSetup, context: StepContext, *, graphed: bool = False
) -> ContractedStep:
    """The step with its other changes made; `graphed`: step and exchange become a CUDA graph."""
    graph = context.graph
    traced = _locate_traced(setup, context)
    tasks = traced.tasks if traced else np.zeros(0, np.intp)
    bare = remove_traced(graph, traced) if traced and len(tasks) else graph
    calls = _moment_calls(setup, context, graph, traced)
    layout = find_layout(bare, np.array(calls or [0], np.int32), on_host=context.on_host)
    if calls:
        calls[-1] = layout.end_of_backward
    one_launch = _launch_once(context, bare) if graphed else None
    step = ContractedStep(
        planned=_tabulate_planned(setup, bare, one_launch, calls) if calls else None,
        traced=None,
        compute=1 + layout.compute,
        task_ns=float(one_launch.calls.call_ns.sum()) / len(one_launch.tasks)
        if one_launch
        else None,
    )
    if traced is None or not len(tasks):
        return step
    waiting, share = _split_waiting(context, setup, traced, graph)
    whole = _launch_once(context, graph) if graphed else graph
    other_comm = (bare.tasks.kind == Kind.COMM).any()
    return replace(
        step,
        traced=_tabulate(setup, whole, (), tasks.tolist()),
        silent_ns=step_without_comm_ns(whole),
        quiet_ns=step_without_comm_ns(one_launch or bare) if other_comm else None,
        waiting_ns=float(waiting.sum()) if traced.buckets else 0.0,
        wait_ns=tuple(waiting.tolist()),
        share=tuple(share.tolist()),
    )


def _launch_once(context: StepContext, graph: StepGraph) -> StepGraph:
    return cuda_graphs.apply(changed(context, graph), "").context.graph


def _locate_traced(setup: ScalingSetup, context: StepContext) -> TracedExchange | None:
    """The trace's exchange in this graph: the same tasks, wherever they are now."""
    graph, known = context.graph, setup.traced
    if known is None or not setup.retimed:
        has_buckets = any(kind == "bucket" for kind, _ in setup.places)
        return find_traced_exchange(context, graph) if has_buckets else None
    return replace(known, tasks=np.flatnonzero(np.isin(graph.tasks.row, setup.rows)))


def _moment_calls(
    setup: ScalingSetup, context: StepContext, graph: StepGraph, traced: TracedExchange | None
) -> list[int]:
    """The graph's call at each moment of the setup; the last one is still open."""
    if not setup.places:
        return []
    ready = {"forward": [first_forward_call(graph)], "end": [0], "gradient": [], "bucket": []}
    if any(kind == "gradient" for kind, _ in setup.places):
        gradients = find_gradients(context, graph)
        ready["gradient"] = gradients.ready.tolist() if gradients else []
    if traced and traced.buckets:
        ready["bucket"] = traced.buckets.ready.tolist()
    calls = [ready[kind][number] for kind, number in setup.places]
    return [int(call) for call in np.maximum.accumulate(np.array(calls))]


def _tabulate(
    setup: ScalingSetup, graph: StepGraph, cuts: Sequence[int], marked: Sequence[int] = ()
) -> StepTables:
    """Adds what a slower worker changes, unless that is simply a share of everything."""
    tables = tabulate_step(graph, cuts, marked)
    farthest = max((link.straggling for link in setup.links), key=lambda pace: abs(pace - 1))
    if farthest == 1.0 or not (len(marked) or (graph.tasks.after >= 0).any()):
        return tables
    slowed = tabulate_step(slow_down(graph, farthest), cuts, marked)
    return add_slope(tables, slowed, farthest)


def _tabulate_planned(
    setup: ScalingSetup, bare: StepGraph, one_launch: StepGraph | None, calls: list[int]
) -> StepTables:
    if one_launch is None:
        return _tabulate(setup, bare, calls)
    bounds = np.searchsorted(bare.tasks.call, np.array(calls)).tolist()
    return _tabulate(setup, split_launch(one_launch, bounds), range(1, len(calls) + 1))


def _split_waiting(
    context: StepContext, setup: ScalingSetup, traced: TracedExchange, graph: StepGraph
) -> tuple[np.ndarray, np.ndarray]:
    durations = graph.tasks.dur_ns[traced.tasks]
    if traced.buckets is None:
        return durations, np.zeros(len(durations))
    now = find_link_times(context, traced, setup.before)
    return split_waiting(durations, traced.sizes, now)
