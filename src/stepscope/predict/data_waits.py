"""The training thread's waits for the data loader, taken out of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.replay.measured import scale_host
from stepscope.explain.replay.schedule import step_ns
from stepscope.explain.work import DATA_LOADING
from stepscope.predict.host_time import shorten_gaps
from stepscope.records.trace import HostKind

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import StepGraph
    from stepscope.predict.step_context import StepContext


def without_waits(context: StepContext) -> tuple[StepGraph, float, int]:
    """The typical step without its waits, what that saves, and how many there were.

    A window that recorded a stall shows a longer wait than a typical step has, and a lucky one a
    shorter wait: the run knows it. On a device a longer wait may be hidden behind queued work.
    """
    waits = (HostKind.ANNOTATION, DATA_LOADING.search)
    graph, saved_ns, events = shorten_gaps(context, *waits)
    measured = context.analysis.measured
    typical_ns = measured.data_ns if measured else None
    if typical_ns is not None and saved_ns > typical_ns:
        return shorten_gaps(context, *waits, 1 - typical_ns / saved_ns)
    whole_ns = step_ns(context.graph)
    if typical_ns is not None and graph.on_host and saved_ns < typical_ns < whole_ns:
        rest = scale_host(graph, (whole_ns - typical_ns) / (whole_ns - saved_ns))
        return rest, float(typical_ns), max(1, events)
    return graph, saved_ns, events
