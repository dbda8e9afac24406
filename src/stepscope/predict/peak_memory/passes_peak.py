"""The highest point of a changed step's forward and backward.

The captured peak says how much was kept for backward then, and how many gradients there were: this
names the node that ran. What was allocated beyond the graph's account is that node's workspace. It
comes back where the node runs; blocks that run again are alike, so any of them may need as much. A
narrow dtype halves it. A convolution in fp32 is another case: on tensor cores its algorithm is
another one, which needs copies in another layout instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from stepscope.predict.peak_memory.convolution_buffers import is_convolution, layout_copies_bytes
from stepscope.predict.peak_memory.graph_blocks import OUTSIDE, block_of_nodes
from stepscope.predict.peak_memory.held_values import MemoryChange
from stepscope.predict.peak_memory.node_level import find_nearest, level_at
from stepscope.predict.peak_memory.standing_bytes import keeps_gradients

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.predict.peak_memory.graph_levels import GraphLevels
    from stepscope.predict.peak_memory.node_level import NodeLevel
    from stepscope.records.backward_graph import GraphNode
    from stepscope.records.memory import CapturedMemory

_FORWARD, _BACKWARD = "forward", "backward"
_NARROW_SHARE = 0.5  # of a workspace
# How far the captured peak may be from a node's account, relative to what forward kept.
_SAME = 0.01


class PeakWorkspace(msgspec.Struct, frozen=True, kw_only=True):
    """What the captured peak held beyond the graph's account."""

    size_bytes: float
    in_fp32_convolution: bool = False  # whose algorithm cuDNN chose


def passes_then(levels: GraphLevels, present: float, change: MemoryChange) -> tuple[float, float]:
    """The highest point with the change, given that of the present step, and the doubt about
    workspaces."""
    now, then = levels.backward(MemoryChange(batch=change.batch)), levels.backward(change)
    if not levels.has_account:
        return present + then.kept_bytes - now.kept_bytes, 0.0
    states = min(levels.states_bytes, present - now.peak_bytes)
    old = levels.old_gradients_bytes
    held, (outputs, outputs_doubt) = (
        levels.outputs_bytes(MemoryChange())[0],
        levels.outputs_bytes(change),
    )
    # In forward such a result counts where it is made and read, in backward beside the graph.
    before = states - held + old
    backward, doubt = _backward_then(levels, present - states, change)
    forward, forward_doubt = _forward_then(levels, present - before, change)
    backward, forward = states - held + outputs + backward, before + forward
    doubt = forward_doubt if forward > backward else doubt + outputs_doubt
    lowest = present if is_before_the_graph(levels) else 0.0
    return max(backward, forward, lowest), doubt


def is_before_the_graph(levels: GraphLevels) -> bool:
    """Whether nothing was kept for backward at the captured peak: the script prepared its batch,
    and no operator of the graph had run."""
    peak = levels.captured.peak
    if peak is None or peak.phase != _FORWARD:
        return False
    kept = levels.backward(MemoryChange()).kept_bytes
    return (peak.categories.get("activations") or 0) < _SAME * kept


def find_workspace(levels: GraphLevels) -> PeakWorkspace:
    """None of it if the peak was in the optimizer's step, or an account or a graph is missing. If
    no node fits, temporaries may be the workspace of any convolution."""
    peak = levels.captured.peak
    if peak is None or peak.allocated_bytes is None or peak.phase not in (_FORWARD, _BACKWARD):
        return PeakWorkspace(size_bytes=0.0)
    if not levels.has_graph or is_before_the_graph(levels):
        return PeakWorkspace(size_bytes=0.0)
    node = find_peak_node(levels, peak.phase)
    room = peak.allocated_bytes - levels.states_bytes
    if peak.phase == _FORWARD:
        room -= levels.old_gradients_bytes
        highest = highest_of(levels.forward(MemoryChange()))
    else:
        highest = levels.level(MemoryChange())
    size = max(0.0, room - (node.peak_bytes if node else highest))
    if node is not None:
        is_chosen = node.place in levels.fp32_convolutions
        return PeakWorkspace(size_bytes=size, in_fp32_convolution=is_chosen)
    size = min(size, peak.categories.get("temporaries") or 0)
    return PeakWorkspace(size_bytes=size, in_fp32_convolution=levels.traced.convolves_in_fp32)


def _backward_then(levels: GraphLevels, room: float, change: MemoryChange) -> tuple[float, float]:
    """Its highest level with the change, and the doubt about workspaces. `room` is what the present
    peak holds besides what is there in every step."""
    captured = levels.captured
    now, then = levels.backward(MemoryChange(batch=change.batch)), levels.backward(change)
    unseen = max(0.0, room - now.peak_bytes)
    if _phase(captured) == _FORWARD:
        return then.peak_bytes, 0.0
    node = find_peak_node(levels, _BACKWARD)
    if node is None or captured.graph is None:
        # What was not seen may be a convolution's workspace, which copies stand in for.
        as_it_is = levels.backward(replace(change, layout_copies=()))
        highest = max(then.peak_bytes, as_it_is.peak_bytes + _share(change) * unseen)
        return highest, 0.5 * unseen
    workspace = max(0.0, room - now.at(node.place))
    if _leaves_fp32(levels, node, change):
        return then.peak_bytes, _copies(levels, node, change, backward=True)
    in_block = change.recompute and block_of_nodes(captured.graph)[node.place] != OUTSIDE
    elsewhere = _share(change) * unseen if in_block else 0.0
    highest = max(then.peak_bytes + elsewhere, then.at(node.place) + _share(change) * workspace)
    return highest, 0.5 * unseen


def _forward_then(levels: GraphLevels, room: float, change: MemoryChange) -> tuple[float, float]:
    """Its highest level with the change, and the doubt about workspaces."""
    now, then = levels.forward(MemoryChange(batch=change.batch)), levels.forward(change)
    node = find_peak_node(levels, _FORWARD)
    # Forward was never higher than the captured peak.
    highest = highest_of(then) - max(0.0, highest_of(now) - room)
    joined = max(then, key=lambda level: level.peak_bytes).joined_bytes if then else 0.0
    if node is None:
        unseen = max(0.0, room - highest_of(now)) if _is_in_graph(levels, _FORWARD) else 0.0
        copies = highest_of(then) - highest_of(levels.forward(replace(change, layout_copies=())))
        return highest - copies + max(copies, _share(change) * unseen), joined
    if _leaves_fp32(levels, node, change):
        return highest, joined + _copies(levels, node, change, backward=False)
    workspace = room - level_at(now, node.place)
    own = level_at(then, node.place) + max(workspace, 0.0) * _share(change) + min(workspace, 0.0)
    return max(highest, own), joined if highest > own else 0.0


def _is_in_graph(levels: GraphLevels, phase: str) -> bool:
    return _phase(levels.captured) == phase and not is_before_the_graph(levels)


def _leaves_fp32(levels: GraphLevels, node: NodeLevel, change: MemoryChange) -> bool:
    """Whether the node at the peak is a convolution that gets another algorithm."""
    return bool(change.layout_copies) and node.place in levels.fp32_convolutions


def _copies(levels: GraphLevels, node: NodeLevel, change: MemoryChange, *, backward: bool) -> float:
    """The doubt about an algorithm that was not seen: its copies once more, or none."""
    return layout_copies_bytes(levels.hold(change), node.place, backward=backward)


def _share(change: MemoryChange) -> float:
    return _NARROW_SHARE if change.autocast else 1.0


def find_peak_node(levels: GraphLevels, phase: str) -> NodeLevel | None:
    """The node that ran at the captured peak, if that was in this phase and one fits. While an
    activation's result is kept and the next convolution runs, the same is kept: what is beyond the
    graph's account is then the convolution's."""
    captured = levels.captured
    peak = captured.peak
    if peak is None or peak.phase != phase:
        return None
    kept = peak.categories.get("activations") or 0
    nodes = captured.graph.nodes if captured.graph else ()
    within, likely = _SAME * kept, _convolutions(nodes)
    if phase == _FORWARD:
        return find_nearest(
            levels.forward(MemoryChange()), kept, None, within=within, likely=likely
        )
    gradients = None if keeps_gradients(captured) else peak.categories.get("gradients") or 0
    backward = levels.backward(MemoryChange()).nodes
    return find_nearest(backward, kept, gradients, within=within, likely=likely)


def _convolutions(nodes: Sequence[GraphNode]) -> frozenset[int]:
    """Places of operators that need a workspace."""
    return frozenset(place for place, node in enumerate(nodes) if is_convolution(node.name))


def highest_of(nodes: tuple[NodeLevel, ...]) -> float:
    return max((node.peak_bytes for node in nodes), default=0.0)


def _phase(captured: CapturedMemory) -> str | None:
    return captured.peak.phase if captured.peak else None
