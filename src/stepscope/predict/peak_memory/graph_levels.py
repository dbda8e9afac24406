"""Levels of a captured graph's passes, worked out once for each change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from stepscope.predict.peak_memory.backward_levels import replay_backward
from stepscope.predict.peak_memory.forward_levels import replay_forward
from stepscope.predict.peak_memory.held_values import MemoryChange, hold
from stepscope.predict.peak_memory.standing_bytes import (
    keeps_gradients,
    old_gradients_bytes,
    states_bytes,
)

if TYPE_CHECKING:
    from stepscope.predict.peak_memory.backward_levels import BackwardLevels
    from stepscope.predict.peak_memory.held_values import HeldGraph
    from stepscope.predict.peak_memory.node_level import NodeLevel
    from stepscope.records.memory import CapturedMemory


class TracedPasses(msgspec.Struct, frozen=True, kw_only=True):
    """What the trace says about the passes and the backward graph does not."""

    cleared_late: bool = False  # the old gradients, after forward
    # Nodes of dense convolutions in torch's usual layout that run in plain fp32.
    fp32_convolutions: frozenset[int] = frozenset()


class GraphLevels:
    def __init__(self, captured: CapturedMemory, traced: TracedPasses | None = None) -> None:
        traced = traced or TracedPasses()
        self.captured = captured
        self.has_account = bool(captured.peak and captured.peak.allocated_bytes is not None)
        self.states_bytes = states_bytes(captured)
        late = traced.cleared_late
        self.old_gradients_bytes = old_gradients_bytes(captured, cleared_late=late)
        # Those that cuDNN may run by any algorithm for fp32.
        self.fp32_convolutions = traced.fp32_convolutions
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
            keeps = keeps_gradients(self.captured)
            self._backward[key] = replay_backward(self.hold(key), keeps_gradients=keeps)
        return self._backward[key]

    def forward(self, change: MemoryChange) -> tuple[NodeLevel, ...]:
        key = _of_passes(change)
        if key not in self._forward:
            self._forward[key] = replay_forward(self.hold(key))
        return self._forward[key]

    def hold(self, change: MemoryChange) -> HeldGraph:
        graph = self.captured.graph
        assert graph is not None
        return hold(graph, self.captured.device or "cpu", change)


def _of_passes(change: MemoryChange) -> MemoryChange:
    return replace(change, other_update=False, update_bytes=0)
