"""Compiled graphs in the flame graphs: under each graph its source lines, operators and kernels."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np

from stepscope.ui.html.classes import EVENT_CLASSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from stepscope.explain.compiled.graph_kernels import OpenedRegions
    from stepscope.explain.compiled.kernel_lines import KernelFacts

    Ints = NDArray[np.int64]

_NO_LINE = "(line not known)"
_MOST_OPERATORS = 4  # named in one label
_LINE, _OPERATOR, _COMPUTE = (
    EVENT_CLASSES.index(name) for name in ("python_call", "operator", "compute")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRows:
    """Host events as far as call stacks need them."""

    parent: Ints
    thread: Ints
    dur_ns: Ints
    name: Ints
    kind: NDArray[np.uint8]  # index into EVENT_CLASSES

    def __len__(self) -> int:
        return len(self.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRows:
    """The device's work, and the host row that launched each piece."""

    launch: Ints
    dur_ns: Ints
    name: Ints
    kind: NDArray[np.uint8]  # index into EVENT_CLASSES
    is_work: NDArray[np.bool_]  # other events only describe

    def only_work(self) -> LaunchedRows:
        rows = np.flatnonzero(self.is_work)
        return LaunchedRows(**{one.name: getattr(self, one.name)[rows] for one in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _LineParts:
    """Each piece once for every line that it computes."""

    piece: Ints
    dur_ns: Ints
    line: Ints  # names
    operators: Ints
    kernel: Ints
    first: NDArray[np.bool_]  # of its piece


def open_host_stacks(
    rows: StackRows, opened: OpenedRegions, add_name: Callable[[str], int]
) -> StackRows:
    """Where the CPU computes: operators move under their line, and loops get rows of their own."""
    parts, pieces = _split_by_line(opened, add_name), opened.pieces
    rows = _without_frames(rows, np.unique(pieces.region))
    event, region = pieces.event[parts.piece], pieces.region[parts.piece].astype(np.int64)
    with_lines = _append(rows, region, parts.dur_ns, parts.line, _LINE)
    line_row = len(rows) + np.arange(len(region))
    moved = (event >= 0) & parts.first
    with_lines.parent[event[moved]] = line_row[moved]
    loops = np.flatnonzero(event < 0)
    ns = parts.dur_ns[loops]
    named = _append(with_lines, line_row[loops], ns, parts.operators[loops], _OPERATOR)
    operator_row = len(with_lines) + np.arange(len(loops))
    return _append(named, operator_row, ns, parts.kernel[loops], _COMPUTE)


def _without_frames(rows: StackRows, regions: Ints) -> StackRows:
    """Python's frames inside a graph's run are those of generated code: lines take their place."""
    is_region = np.zeros(len(rows) + 1, np.bool_)  # the last one stands for no parent
    is_region[regions] = True
    inside = is_region[rows.parent]
    while True:
        deeper = inside | np.append(inside, False)[rows.parent]
        if (deeper == inside).all():
            break
        inside = deeper
    frame = np.append(inside & (rows.kind == _LINE), False)
    parent = rows.parent.copy()
    while (hidden := np.flatnonzero(frame[parent])).size:
        parent[hidden] = parent[parent[hidden]]
    return replace(rows, parent=parent, dur_ns=np.where(frame[:-1], 0, rows.dur_ns))


def open_launches(
    rows: StackRows,
    launched: LaunchedRows,
    opened: OpenedRegions,
    add_name: Callable[[str], int],
) -> tuple[StackRows, LaunchedRows]:
    """Where an accelerator computes: kernels of graphs are launched by their operators' lines."""
    parts, pieces = _split_by_line(opened, add_name), opened.pieces
    nothing = np.zeros(len(parts.piece), np.int64)
    region = pieces.region[parts.piece].astype(np.int64)
    with_lines = _append(rows, region, nothing, parts.line, _LINE)
    line_row = len(rows) + np.arange(len(region))
    stacks = _append(with_lines, line_row, nothing, parts.operators, _OPERATOR)
    operator_row = len(with_lines) + np.arange(len(region))
    event = pieces.event[parts.piece]
    is_opened = np.zeros(len(launched.launch), np.bool_)
    is_opened[event] = True
    kept = np.flatnonzero(~is_opened)
    return stacks, LaunchedRows(
        launch=np.append(launched.launch[kept], operator_row),
        dur_ns=np.append(launched.dur_ns[kept], parts.dur_ns),
        name=np.append(launched.name[kept], launched.name[event]),
        kind=np.append(launched.kind[kept], launched.kind[event]),
        is_work=np.append(launched.is_work[kept], launched.is_work[event]),
    )


def _append(rows: StackRows, parent: Ints, dur_ns: Ints, name: Ints, kind: int) -> StackRows:
    """Rows inside others; they run on the threads of those."""
    return StackRows(
        parent=np.append(rows.parent, parent),
        thread=np.append(rows.thread, rows.thread[parent]),
        dur_ns=np.append(rows.dur_ns, dur_ns),
        name=np.append(rows.name, name),
        kind=np.append(rows.kind, np.full(len(parent), kind, np.uint8)),
    )


def _split_by_line(opened: OpenedRegions, add_name: Callable[[str], int]) -> _LineParts:
    pieces = opened.pieces
    known = np.flatnonzero(pieces.kernel >= 0)
    sizes = [0, *(len(facts) for facts in opened.facts)]
    fact_number = np.cumsum(sizes)[pieces.graph[known]] + pieces.kernel[known]
    facts = [fact for some in opened.facts for fact in some]
    number = _Names(add_name)
    lines = [_lines(fact) for fact in facts]
    count = np.array([len(one) for one in lines], np.int64)
    begin = np.cumsum(count) - count
    label = np.array([number(text) for one in lines for text, _ in one], np.int64)
    share = np.array([part for one in lines for _, part in one], float)
    operators = np.array([number(_operators(fact)) for fact in facts], np.int64)
    kernel = np.array([number(fact.name) for fact in facts], np.int64)
    times = count[fact_number]
    piece = np.repeat(known, times)
    fact = np.repeat(fact_number, times)
    ends = np.cumsum(times)
    place = np.arange(len(piece)) - np.repeat(ends - times, times)
    at = begin[fact] + place
    dur = np.floor(pieces.dur_ns[piece] * share[at]).astype(np.int64)
    first = place == 0
    rest = pieces.dur_ns[known] - np.bincount(
        np.repeat(np.arange(len(known)), times), dur, len(known)
    ).astype(np.int64)
    dur[first] += rest
    return _LineParts(
        piece=piece,
        dur_ns=dur,
        line=label[at],
        operators=operators[fact],
        kernel=kernel[fact],
        first=first,
    )


class _Names:
    """Each text gets one number."""

    def __init__(self, add_name: Callable[[str], int]) -> None:
        self._add, self._known = add_name, dict[str, int]()

    def __call__(self, text: str) -> int:
        if text not in self._known:
            self._known[text] = self._add(text)
        return self._known[text]


def _lines(fact: KernelFacts) -> list[tuple[str, float]]:
    if not fact.lines:
        return [(_NO_LINE, 1.0)]
    return [
        (f"{PurePath(place.file).name}:{place.line} {place.function}".rstrip(), share)
        for place, share in fact.lines
    ]


def _operators(fact: KernelFacts) -> str:
    names = [name.removeprefix("aten::") for name in fact.operators]
    if len(names) == 1:
        return fact.operators[0]
    more = ", ..." if len(names) > _MOST_OPERATORS else ""
    return ", ".join(names[:_MOST_OPERATORS]) + more or "(operators not known)"
