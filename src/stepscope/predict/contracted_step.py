"""One changed step as scaling needs it: its tables between the moments of the exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.work import Kind
from stepscope.predict import exchange
from stepscope.predict.buckets import find_gradients
from stepscope.predict.max_plus import add_slope, split_launch, tabulate_step
from stepscope.predict.outcome import changed
from stepscope.predict.scale_out import step_without_comm_ns
from stepscope.predict.scaling_grid import find_link_times, first_forward_call
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
    """One changed step."""

    planned: StepTables | None  # the exchange is put in
    traced: StepTables | None  # or it is there, with durations to be told
    compute: int  # which of the times the compute stream is
    waiting_ns: float = 0.0  # inside the traced exchange, for other ranks
    wait_ns: tuple[float, ...] = ()  # the same of each
    share: tuple[float, ...] = ()  # of the expected transfer that each took
    # If no collective took any time: the traced step, and that with other buckets, where that has
    # collectives besides.
    silent_ns: float = 0.0
    quiet_ns: float | None = None
    task_ns: float | None = None  # of a CUDA graph: the host's time for one more task


def contract_step(
    crew: ScalingSetup, context: StepContext, *, graphed: bool = False
) -> ContractedStep:
    """The step with its other changes made; a CUDA graph is made of it behind the exchange."""
    graph = context.graph
    traced = _traced(crew, context)
    tasks = traced.tasks if traced else np.zeros(0, np.intp)
    bare = exchange.without_traced(graph, traced) if traced and len(tasks) else graph
    calls = _calls(crew, context, graph, traced)
    ready = np.array(calls or [0], np.int32)
    place = exchange.find_layout(bare, ready, on_host=context.on_host)
    if calls:
        calls[-1] = place.end_of_backward
    one = _graphed(context, bare) if graphed else None
    known = ContractedStep(
        planned=_planned(crew, bare, one, calls) if calls else None,
        traced=None,
        compute=1 + place.compute,
        task_ns=float(one.calls.call_ns.sum()) / len(one.tasks) if one else None,
    )
    if traced is None or not len(tasks):
        return known
    waiting, share = _waiting(context, crew, traced, graph)
    whole = _graphed(context, graph) if graphed else graph
    return replace(
        known,
        traced=_outline(crew, whole, (), tasks.tolist()),
        silent_ns=step_without_comm_ns(whole),
        quiet_ns=step_without_comm_ns(one or bare)
        if (bare.tasks.kind == Kind.COMM).any()
        else None,
        waiting_ns=float(waiting.sum()) if traced.buckets else 0.0,
        wait_ns=tuple(waiting.tolist()),
        share=tuple(share.tolist()),
    )


def _graphed(context: StepContext, graph: StepGraph) -> StepGraph:
    return cuda_graphs.apply(changed(context, graph), "").context.graph


def _traced(crew: ScalingSetup, context: StepContext) -> TracedExchange | None:
    """The exchange of the trace in this graph: the same tasks, wherever they are now."""
    graph, known = context.graph, crew.traced
    if known is None or not crew.retimed:
        shown = any(kind == "bucket" for kind, _ in crew.places)
        return find_traced_exchange(context, graph) if shown else None
    return replace(known, tasks=np.flatnonzero(np.isin(graph.tasks.row, crew.rows)))


def _calls(
    crew: ScalingSetup, context: StepContext, graph: StepGraph, traced: TracedExchange | None
) -> list[int]:
    """The graph's calls at the crew's moments, the last one still open."""
    if not crew.places:
        return []
    ready = {"forward": [0], "end": [0], "gradient": [], "bucket": []}
    if any(kind == "gradient" for kind, _ in crew.places):
        gradients = find_gradients(context, graph)
        ready["gradient"] = gradients.ready.tolist() if gradients else []
    if traced and traced.buckets:
        ready["bucket"] = traced.buckets.ready.tolist()
    ready["forward"] = [first_forward_call(graph)]
    found = [ready[kind][number] for kind, number in crew.places]
    return [int(at) for at in np.maximum.accumulate(np.array(found))]


def _outline(
    crew: ScalingSetup, graph: StepGraph, cuts: Sequence[int], marked: Sequence[int] = ()
) -> StepTables:
    """With what a slower worker changes, where that is not simply a share of everything."""
    found = tabulate_step(graph, cuts, marked)
    far = max((link.straggling for link in crew.links), key=lambda pace: abs(pace - 1))
    if far == 1.0 or not (len(marked) or (graph.tasks.after >= 0).any()):
        return found
    return add_slope(found, tabulate_step(slow_down(graph, far), cuts, marked), far)


def _planned(
    crew: ScalingSetup, bare: StepGraph, one: StepGraph | None, calls: list[int]
) -> StepTables:
    if one is None:
        return _outline(crew, bare, calls)
    bounds = np.searchsorted(bare.tasks.call, np.array(calls)).tolist()
    return _outline(crew, split_launch(one, bounds), range(1, len(calls) + 1))


def _waiting(
    context: StepContext, crew: ScalingSetup, traced: TracedExchange, graph: StepGraph
) -> tuple[np.ndarray, np.ndarray]:
    durations = graph.tasks.dur_ns[traced.tasks]
    if traced.buckets is None:
        return durations, np.zeros(len(durations))
    return split_waiting(durations, traced.buckets, find_link_times(context, traced, crew.before))
