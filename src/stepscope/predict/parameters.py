"""The model's parameters, read from backward's accumulation of gradients.

A gradient is accumulated once in every backward pass that reaches its parameter. A step with
several micro-batches or losses has several passes that reach the same parameters. So a pass does
not count if a later one brings the same gradients, or if a longer one begins with it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.call_tree import distinct_counts
from stepscope.explain.flops.phases import FORWARD
from stepscope.explain.steps import step_of
from stepscope.explain.work import rows_named
from stepscope.records.trace import HostKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.rank_analysis import RankAnalysis

    Rows = NDArray[np.intp]

ACCUMULATE = "torch::autograd::AccumulateGrad"
_UPDATE = "Optimizer.step#"


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    tensors: int
    elements: int
    shapes: tuple[tuple[int, ...], ...]


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    rows: Rows  # indices among the accumulations
    shapes: tuple[int, ...]  # codes, in backward's order
    updates: int  # optimizer steps before it

    def repeats(self, other: Pass) -> bool:
        """Whether its parameters are among those of the other one.

        Without an optimizer step in between, the same gradients are another micro-batch's. With one
        they may belong to another network of the same kind. But a longer pass that begins with them
        goes through the same network, as a generator's pass does with its discriminator.
        """
        if len(self.shapes) < len(other.shapes):
            return other.shapes[: len(self.shapes)] == self.shapes
        return self.updates == other.updates and sorted(self.shapes) == sorted(other.shapes)


def find_parameters(analysis: RankAnalysis) -> Parameters | None:
    """Parameters of a mean step; None if the trace shows no accumulation, or no shapes."""
    trace = analysis.trace
    host = trace.host
    rows = np.flatnonzero(
        rows_named(trace, host, host.kind == HostKind.OPERATOR, lambda name: name == ACCUMULATE)
    )
    if not len(rows) or (host.shapes[rows] < 0).any():
        return None
    rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
    passes = _passes(analysis, rows)
    rows = rows[np.concatenate([one.rows for step in passes for one in _drop_repeats(step)])]
    codes, counts = distinct_counts(host.shapes[rows])
    shapes = []
    for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
        dims = msgspec.json.decode(trace.strings[code])
        if dims and isinstance(dims[0], list):
            shapes += [tuple(dims[0])] * max(1, round(count / len(passes)))
    return Parameters(
        tensors=len(shapes), elements=sum(map(math.prod, shapes)), shapes=tuple(shapes)
    )


def _drop_repeats(passes: list[Pass]) -> list[Pass]:
    """When a step runs several identical passes, keep the last."""
    left = list(passes)
    for one in passes:
        if any(other is not one and one.repeats(other) for other in left):
            left = [other for other in left if other is not one]
    return left


def _passes(analysis: RankAnalysis, rows: Rows) -> list[list[Pass]]:
    """Backward passes by step, in order. Operators of the forward pass lie between two passes.

    Passes outside all steps count only if no pass is inside one: the window opened or closed in a
    step.
    """
    trace = analysis.trace
    host = trace.host
    start = host.start_ns[rows]
    known = analysis.steps.steps
    step = step_of(known, start) if known else np.zeros(len(rows), np.int64)
    forward = np.searchsorted(_forward_starts(analysis), start)
    stepping = rows_named(
        trace, host, host.kind == HostKind.ANNOTATION, lambda name: name.startswith(_UPDATE)
    )
    updates = np.searchsorted(np.sort(host.start_ns[stepping]), start)
    edges = np.flatnonzero(np.diff(forward) | np.diff(step)) + 1
    by_step: dict[int, list[Pass]] = {}
    for indices in np.split(np.arange(len(rows)), edges):
        first = indices[0]
        one = Pass(
            rows=indices,
            shapes=tuple(host.shapes[rows[indices]].tolist()),
            updates=int(updates[first]),
        )
        by_step.setdefault(int(step[first]), []).append(one)
    return [passes for number, passes in by_step.items() if number >= 0] or [*by_step.values()]


def _forward_starts(analysis: RankAnalysis) -> NDArray[np.int64]:
    """On the thread that runs most of forward; others, such as a loader's, also run in backward."""
    host = analysis.trace.host
    forward = (host.kind == HostKind.OPERATOR) & (analysis.costs.phase == FORWARD)
    if not forward.any():
        return np.zeros(0, np.int64)
    main = np.bincount(host.thread[forward]).argmax()
    return np.sort(host.start_ns[forward & (host.thread == main)])
