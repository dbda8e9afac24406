"""Merge call stacks into trees, and open compiled graphs in them into source lines,
operators and kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.ui.html.lanes import stack_depth
from stepscope.ui.html.render import EVENT_CLASSES, RUNTIME, THREAD

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.compiled.graph_kernels import KernelFacts, OpenedRegions

    Ints = NDArray[np.int64]

# Call stacks merged into trees: host time by stack, device time by the stack that launched it.
#
# Nodes are in level order: a parent always precedes its children. Sums are exact: bincount adds in
# float64, which holds every integer up to 2**53 ns (104 days).

MAX_NODES = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Flame:
    """A tree as columns. `left_out` counts the narrowest nodes when there were too many."""

    parent: Ints  # -1 for a root
    name: Ints
    kind: NDArray[np.uint8]  # index into EVENT_CLASSES
    count: Ints
    total_ns: Ints
    self_ns: Ints
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStacks:
    """Every distinct call stack of the host, and the stack of each host row."""

    flame: Flame
    node: Ints  # of each host row


def merge_stacks(host: StackRows, *, threads: list[int], thread_name: dict[int, int]) -> HostStacks:
    """Host rows with the same names all the way up become one node; threads are the roots."""
    depth = stack_depth(host.parent)
    node = np.zeros(len(host), dtype=np.int64)
    root_of = np.zeros(max(threads, default=-1) + 1, dtype=np.int64)
    root_of[threads] = np.arange(len(threads))
    tops = np.flatnonzero(depth == 0)
    owner = root_of[host.thread[tops]]
    levels = [
        _Level(
            parent=np.full(len(threads), -1),
            name=np.array([thread_name[t] for t in threads], dtype=np.int64),
            kind=np.full(len(threads), THREAD, dtype=np.uint8),
            count=np.bincount(owner, minlength=len(threads)),
            total_ns=_sum(owner, host.dur_ns[tops], len(threads)),
        )
    ]
    order = np.argsort(depth, kind="stable")
    edges = np.searchsorted(depth[order], np.arange(depth.max(initial=-1) + 2))
    first = len(threads)
    for level in range(len(edges) - 1):
        rows = order[edges[level] : edges[level + 1]]
        above = node[host.parent[rows]] if level else owner
        merged, inverse = _merge(above, host.name[rows], host.kind[rows], host.dur_ns[rows])
        node[rows] = first + inverse
        first += len(merged.parent)
        levels.append(merged)
    return HostStacks(flame=_tree(levels), node=node)


def launched_by(stacks: HostStacks, launched: LaunchedRows, *, unlinked_name: int) -> Flame:
    """Device work under the stack that launched it; kernels are the leaves."""
    tree = stacks.flame
    nodes = len(tree)
    under = _launching_node(stacks, launched.launch)
    under[under < 0] = nodes
    leaves, _ = _merge(under, launched.name, launched.kind, launched.dur_ns)
    parent = np.append(tree.parent, -1)
    own = _sum(under, launched.dur_ns, nodes + 1)
    count = np.bincount(under, minlength=nodes + 1)
    inner = _Level(
        parent=parent,
        name=np.append(tree.name, unlinked_name),
        kind=np.append(tree.kind, np.uint8(THREAD)),
        count=_add_up(parent, count),
        total_ns=_add_up(parent, own),
    )
    flame = _tree([inner, leaves])
    return _select(flame, flame.count > 0)


def keep_widest(flame: Flame, max_nodes: int = MAX_NODES) -> Flame:
    """Keep the widest nodes. A parent is never narrower than its child, so none is orphaned."""
    if len(flame) <= max_nodes:
        return flame
    widest = np.lexsort((np.arange(len(flame)), -_subtree_peak(flame)))[:max_nodes]
    selected = np.zeros(len(flame), dtype=bool)
    selected[widest] = True
    return _select(flame, selected, left_out=len(flame) - max_nodes)


def _subtree_peak(flame: Flame) -> Ints:
    """Total of a node, or of its widest descendant where clocks make a child longer."""
    peak = flame.total_ns.copy()
    for row in _levels_up(flame.parent):
        np.maximum.at(peak, flame.parent[row], peak[row])
    return peak


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    parent: Ints
    name: Ints
    kind: NDArray[np.uint8]
    count: Ints
    total_ns: Ints


def _merge(above: Ints, name: Ints, kind: NDArray[np.uint8], dur_ns: Ints) -> tuple[_Level, Ints]:
    """One node for each (node above, name, class), and the node of every row given."""
    names = int(name.max(initial=0)) + 1
    key = (above * names + name) * 256 + kind
    unique, inverse, count = np.unique(key, return_inverse=True, return_counts=True)
    merged = _Level(
        parent=unique // 256 // names,
        name=unique // 256 % names,
        kind=(unique % 256).astype(np.uint8),
        count=count,
        total_ns=_sum(inverse, dur_ns, len(unique)),
    )
    return merged, inverse


def _sum(group: Ints, value: Ints, groups: int) -> Ints:
    return np.bincount(group, weights=value, minlength=groups).astype(np.int64)


def _tree(levels: list[_Level]) -> Flame:
    columns: dict[str, Any] = {
        field.name: np.concatenate([getattr(level, field.name) for level in levels])
        for field in fields(_Level)
    }
    parent, total = columns["parent"], columns["total_ns"]
    child = parent >= 0
    own = np.maximum(total - _sum(parent[child], total[child], len(total)), 0)
    return Flame(**columns, self_ns=own)


def _launching_node(stacks: HostStacks, launch: Ints) -> Ints:
    """The stack above the runtime call, which adds nothing to the kernel's name."""
    node = np.full(len(launch), -1, dtype=np.int64)
    linked = launch >= 0
    node[linked] = stacks.node[launch[linked]]
    rows = np.flatnonzero(linked)
    while len(rows := rows[stacks.flame.kind[node[rows]] == RUNTIME]):
        node[rows] = stacks.flame.parent[node[rows]]
        rows = rows[node[rows] >= 0]
    return node


def _add_up(parent: Ints, own: Ints) -> Ints:
    """Totals from own shares: every level adds its sums to the level above."""
    total = own.astype(np.int64)
    for row in _levels_up(parent):
        np.add.at(total, parent[row], total[row])
    return total


def _levels_up(parent: Ints) -> list[Ints]:
    """Rows of each level that has a parent, deepest level first."""
    depth = stack_depth(parent)
    return [np.flatnonzero(depth == level) for level in range(int(depth.max(initial=0)), 0, -1)]


def _select(flame: Flame, selected: NDArray[np.bool_], left_out: int = 0) -> Flame:
    place = np.cumsum(selected) - 1
    parent = flame.parent[selected]
    return Flame(
        parent=np.where(parent >= 0, place[parent], -1),
        name=flame.name[selected],
        kind=flame.kind[selected],
        count=flame.count[selected],
        total_ns=flame.total_ns[selected],
        self_ns=flame.self_ns[selected],
        left_out=left_out,
    )


# Compiled graphs in the flame graphs: under each graph its source lines, operators and kernels.

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
