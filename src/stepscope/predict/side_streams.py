"""Operators whose kernels run on several streams, as cuDNN runs the parts of a grouped convolution.

Each kernel fills the device, so the parts take turns: a trace shows a wait on one stream while the
kernels of another run. Such a wait becomes longer and shorter with these kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Floats, Ints, StepGraph


def retime(graph: StepGraph, dur_ns: Floats, operator: Ints) -> StepGraph:
    """The graph with other durations, one for each task; `operator` is the host row of each task's
    operator, -1 if not known."""
    tasks = graph.tasks
    factor = _growth(tasks.dur_ns, dur_ns, operator, _on_several_streams(tasks.stream, operator))
    return replace(
        graph,
        tasks=replace(
            tasks,
            dur_ns=dur_ns,
            spacing_ns=tasks.spacing_ns * factor,
            after_ns=tasks.after_ns * factor,
        ),
    )


def _on_several_streams(stream: Ints, operator: Ints) -> Ints:
    """Operators, by their rows."""
    pairs = np.unique(np.stack((operator, stream), axis=1)[operator >= 0], axis=0)
    rows, streams = np.unique(pairs[:, 0], return_counts=True)
    several: Ints = rows[streams > 1]
    return several


def _growth(before_ns: Floats, after_ns: Floats, operator: Ints, chosen: Ints) -> Floats:
    """Of each task: new over old time of all kernels of its operator; 1 for other operators."""
    growth = np.ones(len(before_ns))
    for row in chosen.tolist():
        mine = operator == row
        growth[mine] = float(after_ns[mine].sum()) / max(1.0, float(before_ns[mine].sum()))
    return growth
