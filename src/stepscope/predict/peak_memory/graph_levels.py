"""Levels of a captured graph's passes, worked out once for each change."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from stepscope.predict.peak_memory.autocast_widths import FULL, VIEWS, operator_of
from stepscope.predict.peak_memory.backward_levels import replay_backward
from stepscope.predict.peak_memory.forward_levels import replay_forward
from stepscope.predict.peak_memory.held_values import MemoryChange, hold, maker_of
from stepscope.predict.peak_memory.standing_bytes import (
    keeps_gradients,
    old_gradients_bytes,
    outputs_bytes,
    states_bytes,
)

if TYPE_CHECKING:
    from stepscope.predict.peak_memory.backward_levels import BackwardLevels
    from stepscope.predict.peak_memory.convolution_layout import ConvolutionLayout
    from stepscope.predict.peak_memory.held_values import HeldGraph
    from stepscope.predict.peak_memory.node_level import NodeLevel
    from stepscope.records.memory import CapturedMemory


_SAME = 0.02  # how far two sizes of one value may be apart


class TracedPasses(msgspec.Struct, frozen=True, kw_only=True):
    """What the trace says about the passes and the backward graph does not."""

    cleared_late: bool = False  # the old gradients, after forward
    convolves_in_fp32: bool = False  # without tf32
    fp32_convolutions: tuple[ConvolutionLayout, ...] = ()  # as far as their shapes are known


class GraphLevels:
    def __init__(self, captured: CapturedMemory, traced: TracedPasses | None = None) -> None:
        traced = traced or TracedPasses()
        self.captured = captured
        self.has_account = bool(captured.peak and captured.peak.allocated_bytes is not None)
        self.states_bytes = states_bytes(captured)
        late = traced.cleared_late
        self.old_gradients_bytes = old_gradients_bytes(captured, cleared_late=late)
        self.traced = traced
        # Those that cuDNN may run by any algorithm for fp32.
        self.fp32_convolutions = frozenset(one.place for one in traced.fp32_convolutions)
        self._backward: dict[MemoryChange, BackwardLevels] = {}
        self._forward: dict[MemoryChange, tuple[NodeLevel, ...]] = {}

    @property
    def has_graph(self) -> bool:
        """Whether the graph is known, and the script's own hooks hide no part of it."""
        graph = self.captured.graph
        return graph is not None and bool(graph.nodes) and not graph.hidden

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

    def outputs_bytes(self, change: MemoryChange) -> tuple[float, float]:
        """Of a result that the script holds and backward does not need, such as logits, without the
        growth of the batch; and the doubt. A script that asks for it in fp32 may hold that copy or
        the narrow result: in fp32 both are one tensor."""
        place = self._held_output
        if place is None:
            return 0.0, 0.0
        held = self.hold(_of_passes(change))
        out = held.graph.nodes[place].outputs
        reads = {
            (at, number)
            for at, node in enumerate(held.graph.nodes)
            for number, edge in enumerate(node.inputs)
            if edge.node >= 0 and maker_of(held.graph, edge.node) == place
        }
        elements = out[0].elements if out else 0
        own = elements * held.widths[place][0]
        copied = elements * FULL if reads & change.wide_reads else own
        return (own + copied) / 2, (copied - own) / 2

    @cached_property
    def _held_output(self) -> int | None:
        """The last node whose result nobody keeps and is as large as what the script holds."""
        size, graph = outputs_bytes(self.captured), self.captured.graph
        if graph is None or not size:
            return None
        held = self.hold(MemoryChange())
        kept = {value.producer for value in held.values}
        for place in reversed(range(len(graph.nodes))):
            node = graph.nodes[place]
            if node.is_leaf or place in kept or operator_of(node.name) in VIEWS or not node.outputs:
                continue
            own = node.outputs[0].elements * held.widths[place][0]
            if abs(own - size) < _SAME * size:
                return place
        return None

    def hold(self, change: MemoryChange) -> HeldGraph:
        graph = self.captured.graph
        assert graph is not None
        return hold(graph, self.captured.device or "cpu", change)


def _of_passes(change: MemoryChange) -> MemoryChange:
    return replace(change, other_update=False, update_bytes=0)
