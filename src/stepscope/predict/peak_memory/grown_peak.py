"""The peak of the passes with another batch.

With few samples, gradients outweigh the activations that are already gone, so the peak may be at
another node of backward. Workspaces grow with the batch, except where cuDNN chose the algorithm of
a convolution in fp32: some of what it transforms are weights, and another batch may get another
algorithm. Half of such a workspace is taken to grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.predict.peak_memory.convolution_buffers import transforms_bytes
from stepscope.predict.peak_memory.held_values import MemoryChange
from stepscope.predict.peak_memory.node_level import level_at
from stepscope.predict.peak_memory.passes_peak import find_peak_node, find_workspace, highest_of
from stepscope.predict.peak_memory.standing_bytes import batches_bytes

if TYPE_CHECKING:
    from stepscope.predict.peak_memory.graph_levels import GraphLevels

_FORWARD, _OPTIMIZER = "forward", "optimizer"
_GROWS = 0.5  # of a workspace whose algorithm cuDNN chose


def later_peak(levels: GraphLevels, factor: float) -> float | None:
    """Wherever in the passes it then is. None without a graph or an allocator's account of the
    peak."""
    captured, peak = levels.captured, levels.captured.peak
    if not levels.has_graph or peak is None:
        return None
    if peak.allocated_bytes is None or peak.phase == _OPTIMIZER:
        return None
    grown = batches_bytes(captured) * (factor - 1.0)
    backward = _later_backward(levels, peak.allocated_bytes - levels.states_bytes, factor)
    if peak.phase != _FORWARD:
        return levels.states_bytes + grown + backward
    held = levels.states_bytes + levels.old_gradients_bytes
    forward = _later_forward(levels, peak.allocated_bytes - held, factor)
    return grown + max(levels.states_bytes + backward, held + forward)


def unsure_workspace(levels: GraphLevels, factor: float) -> float:
    """What a workspace may add or not add to the peak, whose algorithm cuDNN chose."""
    workspace = find_workspace(levels)
    return (1 - _GROWS) * workspace.size_bytes * (factor - 1.0) * workspace.in_fp32_convolution


def other_algorithms_peak(levels: GraphLevels, factor: float) -> float:
    """The peak if cuDNN takes Fourier transforms for a convolution in fp32 that did without them;
    0 if there is no such convolution, or the batch is no larger. Strided ones cannot."""
    captured, convolutions = levels.captured, levels.traced.fp32_convolutions
    places = {one.place for one in convolutions if not one.strided}
    if not places or factor <= 1.0 or not levels.has_graph:
        return 0.0
    change = MemoryChange(batch=factor)
    held, standing = levels.hold(change), levels.states_bytes
    forward, backward = levels.forward(change), levels.backward(change).nodes
    levels_then = (
        *((node, standing + levels.old_gradients_bytes) for node in forward),
        *((node, standing) for node in backward),
    )
    grown = batches_bytes(captured) * (factor - 1.0)
    return grown + max(
        base + node.peak_bytes + transforms_bytes(held, node.place)
        for node, base in levels_then
        if node.place in places
    )


def _later_backward(levels: GraphLevels, room: float, factor: float) -> float:
    """`room` is what the captured peak holds besides what is there in every step."""
    now, then = (levels.backward(MemoryChange(batch=batch)) for batch in (1.0, factor))
    if levels.captured.peak and levels.captured.peak.phase == _FORWARD:
        return then.peak_bytes
    node, workspace = find_peak_node(levels, "backward"), find_workspace(levels)
    if node is None or not workspace.in_fp32_convolution:
        unseen = room - now.peak_bytes
        return then.peak_bytes + (unseen * factor if unseen > 0 else unseen)
    own = then.at(node.place) + workspace.size_bytes * factor - unsure_workspace(levels, factor)
    return max(then.peak_bytes, own)


def _later_forward(levels: GraphLevels, room: float, factor: float) -> float:
    now, then = (levels.forward(MemoryChange(batch=batch)) for batch in (1.0, factor))
    node, workspace = find_peak_node(levels, _FORWARD), find_workspace(levels)
    own = level_at(then, node.place) if node else highest_of(then)
    own += workspace.size_bytes * factor - unsure_workspace(levels, factor)
    # Forward was never higher than the captured peak.
    excess = max(0.0, highest_of(now) - room) * factor
    return max(highest_of(then) - excess, own)
