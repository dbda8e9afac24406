"""The slowest of several workers: a step together takes as long as the longest of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.explain.quantiles import median
from stepscope.explain.replay.measured import scale_host
from stepscope.explain.work import Kind
from stepscope.predict.edit import scale_tasks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.replay.graph import StepGraph
    from stepscope.predict.step_context import StepContext

ENOUGH_STEPS = 5  # to say how much they differ
_SAME_ON_ALL = 3.0  # medians: a step so long is an evaluation or a checkpoint, on every rank


def expected_maximum(values: Sequence[float], count: float) -> float:
    """Of so many drawn with replacement. A share of one (0.5) undoes a maximum of two."""
    ordered = np.sort(np.asarray(values, np.float64))
    reach = (np.arange(len(ordered) + 1) / len(ordered)) ** count
    return float((ordered * np.diff(reach)).sum())


def find_straggling(context: StepContext, ranks: int, before: int) -> float:
    """The slowest worker's step over the present one; 1 where too few steps are known.

    Where the ranks of a job are known, each one's own time is drawn; steps alone are already those
    of the slowest.
    """
    steps = own_steps(context)
    if len(steps) < ENOUGH_STEPS or ranks == before:
        return 1.0
    each = before if _from_job(context) else 1
    return expected_maximum(steps, ranks * each / before) / expected_maximum(steps, each)


def own_steps(context: StepContext) -> list[float]:
    """Measured steps without those that are long on every rank at once."""
    steps = np.array(context.steps_ns, np.float64)
    if _from_job(context) and context.job is not None:
        own = context.job.own_ns
        steps = own[(own > 0).all(axis=1)].reshape(-1).astype(np.float64)
    if not len(steps):
        return []
    return [float(ns) for ns in steps[steps <= _SAME_ON_ALL * median(steps)].tolist()]


def _from_job(context: StepContext) -> bool:
    return context.job is not None and len(context.job.ranks) > 1


def slow_down(graph: StepGraph, factor: float) -> StepGraph:
    """All that a worker does by itself, so many times as long."""
    if factor == 1.0:
        return graph
    return scale_tasks(scale_host(graph, factor), graph.tasks.kind != Kind.COMM, factor)
