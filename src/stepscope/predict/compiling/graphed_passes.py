"""A compiled step whose graphs are replayed as CUDA graphs: one launch for each of them.

What the host does before a graph's first kernel stays: guards, and entering the compiled code. Each
later kernel no longer needs a call of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.graph import CallKind
from stepscope.predict.by_text import by_text
from stepscope.predict.graph_costs import COMPILED_SPACING_NS, LAUNCH_NS, PER_NODE_NS

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags, StepGraph
    from stepscope.predict.step_context import StepContext

_MARKS = ("Torch-Compiled Region", "CompiledFunction")


def find_compiled_launches(context: StepContext) -> Flags:
    """Calls that compiled code makes."""
    calls, trace = context.graph.calls, context.trace
    inside = by_text(trace, trace.host.name, calls.operator, _is_compiled, False)
    found: Flags = inside & (calls.kind == CallKind.LAUNCH)
    return found


def _is_compiled(name: str) -> bool:
    return any(mark in name for mark in _MARKS)


def launch_as_graphs(context: StepContext, launches: Flags) -> StepGraph:
    """`launches` of one operator are one graph; a call that waits between them splits it."""
    graph = context.graph
    calls, tasks = graph.calls, graph.tasks
    owner = np.where(launches, calls.operator, -1)
    first = launches & (owner != np.concatenate(([-1], owner[:-1])))
    later = launches & ~first
    gap_ns = np.where(later, 0.0, calls.gap_ns)
    call_ns = np.where(launches, PER_NODE_NS, calls.call_ns) + LAUNCH_NS * first
    inside = later[tasks.call]
    spacing = np.where(inside, np.minimum(tasks.spacing_ns, COMPILED_SPACING_NS), tasks.spacing_ns)
    return replace(
        graph,
        calls=replace(calls, gap_ns=gap_ns, call_ns=call_ns),
        tasks=replace(tasks, spacing_ns=spacing),
    )
