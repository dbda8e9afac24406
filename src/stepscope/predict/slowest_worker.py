"""The slowest of several workers: all of them wait for it."""

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
_LONG_STEP = 3.0  # medians: an evaluation or a checkpoint, long on every rank at once


def expected_maximum(values: Sequence[float], count: float) -> float:
    """Of `count` values drawn with replacement. Half a draw (0.5) undoes a maximum of two."""
    ordered = np.sort(np.asarray(values, np.float64))
    reach = (np.arange(len(ordered) + 1) / len(ordered)) ** count
    return float((ordered * np.diff(reach)).sum())


def find_straggling(context: StepContext, ranks: int, before: int) -> float:
    """The slowest worker's step over the present one; 1 if too few steps are known.

    If the ranks of a job are known, each rank's own time is drawn. Steps alone are already those of
    the slowest rank.
    """
    steps = own_steps(context)
    if len(steps) < ENOUGH_STEPS or ranks == before:
        return 1.0
    draws = before if _knows_ranks(context) else 1
    return expected_maximum(steps, ranks * draws / before) / expected_maximum(steps, draws)


def own_steps(context: StepContext) -> list[float]:
    """Measured steps, without those that are long on every rank at once."""
    steps = np.array(context.steps_ns, np.float64)
    if _knows_ranks(context) and context.job is not None:
        own = context.job.own_ns
        steps = own[(own > 0).all(axis=1)].reshape(-1).astype(np.float64)
    if not len(steps):
        return []
    return [float(ns) for ns in steps[steps <= _LONG_STEP * median(steps)].tolist()]


def _knows_ranks(context: StepContext) -> bool:
    return context.job is not None and len(context.job.ranks) > 1


def slow_down(graph: StepGraph, factor: float) -> StepGraph:
    """Everything that a worker does by itself takes `factor` times as long."""
    if factor == 1.0:
        return graph
    return scale_tasks(scale_host(graph, factor), graph.tasks.kind != Kind.COMM, factor)
