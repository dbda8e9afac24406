"""Call stacks merged into trees: host time by stack, device time by the stack that launched it.

Nodes are in level order: a parent always precedes its children. Sums are exact: bincount adds in
float64, which holds every integer up to 2**53 ns (104 days).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.ui.html.classes import RUNTIME, THREAD
from stepscope.ui.html.lanes import stack_depth

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.ui.html.opened_regions import LaunchedRows, StackRows

    Ints = NDArray[np.int64]

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
