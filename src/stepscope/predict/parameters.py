"""The model's parameters, as backward's accumulation of gradients tells them.

A gradient is accumulated once in every backward pass that reaches its parameter. A step of several
micro-batches or losses has several passes, and its parameters are not those of all of them: a pass
that brings the same gradients as a later one, or that a longer one begins with, is counted once.
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

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_UPDATE = "Optimizer.step#"


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """Of the model."""

    tensors: int
    elements: int
    shapes: tuple[tuple[int, ...], ...]
    item_bytes: int = 4

    @property
    def size_bytes(self) -> int:
        return self.elements * self.item_bytes


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """One backward pass of a step."""

    rows: Rows  # places among the accumulations
    shapes: tuple[int, ...]  # codes, in the order of backward
    updates: int  # optimizer steps before it

    def repeats(self, other: Pass) -> bool:
        """Whether its parameters are among those of the other one.

        Without an optimizer step in between, the same gradients are a further micro-batch's. With
        one they may be another network's of the same kind; only a longer pass that begins with
        them, as a generator's does with its discriminator's, goes through the same.
        """
        if len(self.shapes) < len(other.shapes):
            return other.shapes[: len(self.shapes)] == self.shapes
        return self.updates == other.updates and sorted(self.shapes) == sorted(other.shapes)


def find_parameters(analysis: RankAnalysis) -> Parameters | None:
    """Of a mean step; None where the trace shows no accumulation, or not its shapes."""
    trace = analysis.trace
    host = trace.host
    rows = np.flatnonzero(
        rows_named(trace, host, host.kind == HostKind.OPERATOR, lambda name: name == _ACCUMULATE)
    )
    if not len(rows) or (host.shapes[rows] < 0).any():
        return None
    rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
    passes = _passes(analysis, rows)
    rows = rows[np.concatenate([each.rows for step in passes for each in _without_repeats(step)])]
    codes, counts = distinct_counts(host.shapes[rows])
    shapes = []
    for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
        dims = msgspec.json.decode(trace.strings[code])
        if dims and isinstance(dims[0], list):
            shapes += [tuple(dims[0])] * max(1, round(count / len(passes)))
    return Parameters(
        tensors=len(shapes), elements=sum(map(math.prod, shapes)), shapes=tuple(shapes)
    )


def _without_repeats(passes: list[Pass]) -> list[Pass]:
    """Of those of a step: of passes alike, the last."""
    left = list(passes)
    for each in passes:
        if any(other is not each and each.repeats(other) for other in left):
            left = [other for other in left if other is not each]
    return left


def _passes(analysis: RankAnalysis, rows: Rows) -> list[list[Pass]]:
    """Of every step that has some, in order. Operators of the forward pass lie between two of them.

    What lies in no step counts only where all of it does: the window opened or closed in a step.
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
    found: dict[int, list[Pass]] = {}
    for places in np.split(np.arange(len(rows)), edges):
        first = places[0]
        one = Pass(
            rows=places,
            shapes=tuple(host.shapes[rows[places]].tolist()),
            updates=int(updates[first]),
        )
        found.setdefault(int(step[first]), []).append(one)
    return [passes for at, passes in found.items() if at >= 0] or [*found.values()]


def _forward_starts(analysis: RankAnalysis) -> NDArray[np.int64]:
    """Of the thread that runs most of it: others, such as a loader's, work during backward too."""
    host = analysis.trace.host
    forward = (host.kind == HostKind.OPERATOR) & (analysis.costs.phase == FORWARD)
    if not forward.any():
        return np.zeros(0, np.int64)
    main = np.bincount(host.thread[forward]).argmax()
    return np.sort(host.start_ns[forward & (host.thread == main)])
