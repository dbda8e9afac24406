"""The highest point of a changed step's forward and backward.

The captured peak says how much was kept for backward then, and how many gradients there were: this
names the node that ran. What was allocated beyond the graph's account is that node's workspace. It
comes back where the node runs; blocks that run again are alike, so any of them may need as much. A
narrow dtype halves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from stepscope.predict.peak_memory.backward_levels import replay_backward
from stepscope.predict.peak_memory.forward_levels import replay_forward
from stepscope.predict.peak_memory.graph_blocks import OUTSIDE, block_of_nodes
from stepscope.predict.peak_memory.held_values import MemoryChange, hold
from stepscope.predict.peak_memory.node_level import find_nearest, level_at

if TYPE_CHECKING:
    from stepscope.predict.peak_memory.backward_levels import BackwardLevels
    from stepscope.predict.peak_memory.held_values import HeldGraph
    from stepscope.predict.peak_memory.node_level import NodeLevel
    from stepscope.records.memory import CapturedMemory

_FORWARD, _BACKWARD = "forward", "backward"
_NARROW_SHARE = 0.5  # of a workspace
# How far the captured peak may be from a node's account, relative to what forward kept.
_SAME = 0.01


class GraphLevels:
    """Levels of a captured graph's passes, worked out once for each change."""

    def __init__(self, captured: CapturedMemory) -> None:
        self.captured = captured
        self.has_account = bool(captured.peak and captured.peak.allocated_bytes is not None)
        self._backward: dict[MemoryChange, BackwardLevels] = {}
        self._forward: dict[MemoryChange, tuple[NodeLevel, ...]] = {}

    def level(self, change: MemoryChange) -> float:
        """The highest one of backward. Without an allocator's account only what forward kept is
        known."""
        levels = self.backward(change)
        return levels.peak_bytes if self.has_account else levels.kept_bytes

    def backward(self, change: MemoryChange) -> BackwardLevels:
        key = _of_passes(change)
        if key not in self._backward:
            keeps = _keeps_gradients(self.captured)
            self._backward[key] = replay_backward(self._hold(key), keeps_gradients=keeps)
        return self._backward[key]

    def forward(self, change: MemoryChange) -> tuple[NodeLevel, ...]:
        key = _of_passes(change)
        if key not in self._forward:
            self._forward[key] = replay_forward(self._hold(key))
        return self._forward[key]

    def _hold(self, change: MemoryChange) -> HeldGraph:
        graph = self.captured.graph
        assert graph is not None
        return hold(graph, self.captured.device or "cpu", change)


def passes_then(levels: GraphLevels, present: float, change: MemoryChange) -> tuple[float, float]:
    """The highest point with the change, given that of the present step, and the doubt about
    workspaces."""
    same = MemoryChange(batch=change.batch)
    now, then = levels.backward(same), levels.backward(change)
    if not levels.has_account:
        return present + then.kept_bytes - now.kept_bytes, 0.0
    states = min(states_bytes(levels.captured), present - now.peak_bytes)
    room = present - states
    share = _NARROW_SHARE if change.autocast else 1.0
    backward, unseen = _backward_then(levels, room, share, change)
    forward = _forward_then(levels, room, share, change)
    return states + max(backward, forward), 0.5 * unseen


def _backward_then(
    levels: GraphLevels, room: float, share: float, change: MemoryChange
) -> tuple[float, float]:
    """Its highest level with the change, and the workspace in doubt. `room` is what the present
    peak holds besides what is there in every step."""
    captured = levels.captured
    now, then = levels.backward(MemoryChange(batch=change.batch)), levels.backward(change)
    unseen = max(0.0, room - now.peak_bytes)
    if _phase(captured) == _FORWARD:
        return then.peak_bytes, 0.0
    node = find_peak_node(levels, _BACKWARD)
    if node is None or captured.graph is None:
        return then.peak_bytes + share * unseen, unseen
    workspace = max(0.0, room - now.at(node.place))
    in_block = change.recompute and block_of_nodes(captured.graph)[node.place] != OUTSIDE
    elsewhere = share * unseen if in_block else 0.0
    highest = max(then.peak_bytes + elsewhere, then.at(node.place) + share * workspace)
    return highest, unseen


def _forward_then(levels: GraphLevels, room: float, share: float, change: MemoryChange) -> float:
    """Its highest level with the change."""
    now, then = levels.forward(MemoryChange(batch=change.batch)), levels.forward(change)
    node = find_peak_node(levels, _FORWARD)
    if node is not None:
        workspace = max(0.0, room - level_at(now, node.place))
        own = level_at(then, node.place) + share * workspace
    else:
        unseen = room - _highest(now) if _phase(levels.captured) == _FORWARD else 0.0
        own = _highest(then) + share * max(0.0, unseen)
    # Forward was never higher than the captured peak.
    excess = max(0.0, _highest(now) - room)
    return max(_highest(then), own) - excess


def find_peak_node(levels: GraphLevels, phase: str) -> NodeLevel | None:
    """The node that ran at the captured peak, if that was in this phase and one fits."""
    captured = levels.captured
    peak = captured.peak
    if peak is None or peak.phase != phase:
        return None
    kept = peak.categories.get("activations") or 0
    if phase == _FORWARD:
        return find_nearest(levels.forward(MemoryChange()), kept, None, _SAME * kept)
    gradients = None if _keeps_gradients(captured) else peak.categories.get("gradients") or 0
    return find_nearest(levels.backward(MemoryChange()).nodes, kept, gradients, _SAME * kept)


def _highest(nodes: tuple[NodeLevel, ...]) -> float:
    return max((node.peak_bytes for node in nodes), default=0.0)


def _of_passes(change: MemoryChange) -> MemoryChange:
    return replace(change, other_update=False, update_bytes=0)


def _phase(captured: CapturedMemory) -> str | None:
    return captured.peak.phase if captured.peak else None


def _keeps_gradients(captured: CapturedMemory) -> bool:
    """Whether gradients are there when forward ends."""
    held = {end.phase: end.categories for end in captured.phases}
    return bool((held.get(_FORWARD) or {}).get("gradients"))


def states_bytes(captured: CapturedMemory) -> float:
    """What is there when forward ends, besides activations."""
    for end in captured.phases:
        if end.phase == _FORWARD and end.allocated_bytes is not None:
            return end.allocated_bytes - (end.categories.get("activations") or 0)
    return 0.0
