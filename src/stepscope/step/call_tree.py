"""Sum up and down the host's call tree, level by level instead of event by event, and work
out once per distinct text what follows from a trace's texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.trace import ABSENT, HostEvents, Trace
from stepscope.step.arrays import Bools, Indices, Int32s, Int64s
from stepscope.trace.links import count_ancestors, nearest

_N = TypeVar("_N", bound="np.integer[Any]")


class Levels(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a forest grouped by depth, so that a level can be handled in one operation."""

    parent: Int32s
    order: Indices
    bounds: Indices

    @classmethod
    def of(cls, parent: Int32s) -> Levels:
        depth = count_ancestors(parent)
        deepest = int(depth.max(initial=0))
        # numpy counts small numbers instead of comparing them
        order = np.argsort(depth.astype(np.min_scalar_type(deepest)), kind="stable")
        bounds = np.searchsorted(depth[order], np.arange(deepest + 2))
        return cls(parent=parent, order=order, bounds=bounds)

    def inclusive(self, own: Int64s) -> Int64s:
        """Each row's own amount plus that of all rows below it."""
        total = own.copy()
        for level in range(len(self.bounds) - 2, 0, -1):
            rows = self.order[self.bounds[level] : self.bounds[level + 1]]
            np.add.at(total, self.parent[rows], total[rows])
        return total


def children_sum(parent: Int32s, amount: Int64s) -> Int64s:
    """Per row, the amount of its direct children."""
    total = np.zeros(len(parent), np.int64)
    has = parent >= 0
    np.add.at(total, parent[has], amount[has])
    return total


def enclosing(host: HostEvents, rows: Indices) -> Int32s:
    """The nearest of these host rows around each of them, as an index into `rows`, or -1."""
    number = np.full(len(host), ABSENT, np.int32)
    number[rows] = np.arange(len(rows), dtype=np.int32)
    up = host.parent[rows]
    around = np.where(up >= 0, nearest(host, number >= 0)[np.maximum(up, 0)], ABSENT)
    return np.where(around >= 0, number[np.maximum(around, 0)], ABSENT).astype(np.int32)


def outermost(parent: Int32s, label: NDArray[Any]) -> Bools:
    """Rows without an ancestor of the same label: recursion counts once."""
    outer = np.ones(len(parent), np.bool_)
    rows = np.flatnonzero(parent >= 0)
    above = parent[rows].astype(np.intp)
    while len(rows):
        same = label[above] == label[rows]
        outer[rows[same]] = False
        rows, above = rows[~same], parent[above[~same]].astype(np.intp)
        rows, above = rows[above >= 0], above[above >= 0]
    return outer


def group(*columns: NDArray[Any]) -> tuple[Indices, Indices, int]:
    """Distinct combinations, sorted: the first row of each, every row's group, their number."""
    keys, width = _codes(columns[0])
    for column in columns[1:]:
        codes, wide = _codes(column)
        if width * wide > _room(keys):
            keys, width = _dense(keys, width)
        if width * wide > _room(keys):
            codes, wide = _dense(codes, wide)
        keys, width = keys * wide + codes, width * wide
        if width > _room(keys):
            keys, width = _codes(keys)
    first, inverse = _ranked(keys, width)
    return first, inverse, len(first)


def distinct_places(values: NDArray[_N]) -> tuple[NDArray[_N], Indices]:
    """Distinct integers, sorted, and the index of each row's value among them. np.unique would
    load numpy.ma, which takes as long as a short explanation."""
    first, places, _ = group(values)
    return values[first], places


def distinct_counts(values: NDArray[_N]) -> tuple[NDArray[_N], Indices]:
    """Distinct integers, sorted, and how often each occurs."""
    first, places, count = group(values)
    return values[first], np.bincount(places, minlength=count)


def _room(values: NDArray[Any]) -> int:
    """The largest range of values for which a lookup table is cheaper than sorting."""
    return 4 * len(values) + 1024


def _codes(values: NDArray[Any]) -> tuple[Indices, int]:
    """Numbers from zero in the same order, and an upper limit for them."""
    low = int(values.min(initial=0))
    width = int(values.max(initial=0)) - low + 1
    if width > _room(values):
        order = values.argsort(kind="stable")
        ordered = values[order]
        ranks = np.empty(len(values), np.intp)
        ranks[order] = np.concatenate(([0], np.cumsum(ordered[1:] != ordered[:-1])))
        return ranks, int(ranks[order[-1]]) + 1
    return values.astype(np.intp) - low, width


def _dense(codes: Indices, width: int) -> tuple[Indices, int]:
    """The same without gaps between the numbers."""
    first, ranks = _ranked(codes, width)
    return ranks, len(first)


def _ranked(codes: Indices, width: int) -> tuple[Indices, Indices]:
    """The first row of each distinct code, and the rank of every row's."""
    place = np.full(width, ABSENT, np.intp)
    place[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)  # of equal ones the last written stays
    used = place >= 0
    return place[used], (np.cumsum(used) - 1)[codes]


def sum_by(inverse: Indices, amount: Int64s, count: int) -> Int64s:
    """Exact integer sums per group."""
    total = np.zeros(count, np.int64)
    np.add.at(total, inverse, amount)
    return total


# What follows from the texts of a trace, worked out once per distinct text.

_T = TypeVar("_T", bool, float)


def by_text(
    trace: Trace,
    column: NDArray[np.int32],
    rows: NDArray[np.integer[Any]],
    value_of: Callable[[str], _T],
    absent: _T,
) -> NDArray[Any]:
    """`value_of` the text that each row has in a column; `absent` without a row or a text."""
    if not len(column):
        return np.full(len(rows), absent)
    codes, place = distinct_places(np.where(rows >= 0, column[np.maximum(rows, 0)], -1))
    values = [value_of(trace.strings[code]) if code >= 0 else absent for code in codes.tolist()]
    return np.array(values, type(absent))[place]


def decode_list(trace: Trace, code: int) -> list[Any]:
    """A call's shapes, types or values; empty where they were not recorded, or are damaged."""
    try:
        value = msgspec.json.decode(trace.strings[code]) if code >= 0 else []
    except msgspec.DecodeError:
        return []
    return value if isinstance(value, list) else []


def tensor_shapes(text: str) -> list[tuple[int, ...]]:
    """Of an operator's arguments, without lists of tensors."""
    arguments = msgspec.json.decode(text)
    return [tuple(dims) for dims in arguments if not dims or isinstance(dims[0], int)]


def is_channels_last(strides: str) -> bool:
    """By the first tensor of a convolution: its input or, in backward, its output's gradient."""
    first = next((steps for steps in tensor_shapes(strides) if len(steps) >= 3), ())
    return len(first) >= 3 and first[1] == 1 and first[2] > 1
