"""What a backward graph keeps: each value with its size, and the nodes that keep it.

Under autocast a product keeps a cast copy of an input that is wider than its dtype, one for every
call; weights are cast once. An operator that runs in fp32 keeps a wide copy of a narrow input.
Whatever nobody keeps any more is released when forward is done with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.predict.peak_memory.autocast_widths import (
    FULL,
    NARROW,
    RESULTS,
    VIEWS,
    AutocastRule,
    autocast_rules,
    autocast_widths,
    find_halves,
    is_product,
    is_recurrent_cell,
    is_result,
    operator_of,
    present_widths,
)
from stepscope.predict.peak_memory.fused_attention import with_fused_attention
from stepscope.predict.peak_memory.graph_blocks import OUTSIDE, block_of_nodes

if TYPE_CHECKING:
    from stepscope.predict.peak_memory.convolution_layout import ConvolutionLayout
    from stepscope.records.backward_graph import CapturedBackward, GraphNode, GraphSaved

UNKNOWN = -1  # the producer of a value that needs no gradient
_FLOAT = "float32"


class HeldValue(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int
    holders: tuple[int, ...]  # nodes that keep it until they have run
    producer: int = UNKNOWN  # the node whose result it is
    grows: bool = True  # with the batch
    is_copy: bool = False  # of the producer's result, cast by the one node that keeps it


class MemoryChange(msgspec.Struct, frozen=True, kw_only=True):
    """What is different from the captured step."""

    batch: float = 1.0
    autocast: bool = False
    autocast_dtype: str = "bf16"
    recompute: bool = False
    fuse: bool = False  # compiled: what fused kernels can compute again is not kept
    # The nodes of each attention that autocast's dtype lets a fused kernel take.
    fused_attention: tuple[tuple[int, ...], ...] = ()
    wide_reads: frozenset[tuple[int, int]] = frozenset()  # inputs that the script casts to fp32
    tf32: bool = False  # where fp32 products could run in it
    # Convolutions that copy their tensors into another layout.
    layout_copies: tuple[ConvolutionLayout, ...] = ()
    other_update: bool = False  # the optimizer has another form
    update_bytes: int = 0  # that the optimizer's step needs for a moment

    @property
    def moves_passes(self) -> bool:
        """Whether forward and backward keep anything else than with another batch alone."""
        return self.autocast or self.tf32 or self.recompute or self.fuse


class HeldGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A captured graph with a change made."""

    graph: CapturedBackward
    widths: list[list[int]]  # of each node's results
    rules: list[AutocastRule] | None  # of each node; None without autocast
    values: list[HeldValue]
    block: list[int]  # of each node; OUTSIDE if it is not recomputed
    change: MemoryChange
    device: str  # its kind

    def is_recomputed(self, value: HeldValue) -> bool:
        """Whether it exists only while its block's backward runs."""
        blocks = {self.block[holder] for holder in value.holders}
        if len(blocks) != 1 or OUTSIDE in blocks:
            return False
        return value.producer == UNKNOWN or self.block[value.producer] in blocks

    def bytes_of(self, value: HeldValue) -> float:
        return value.size_bytes * (self.change.batch if value.grows else 1.0)

    @property
    def kept_bytes(self) -> float:
        """When backward begins."""
        return sum(self.bytes_of(value) for value in self.values if not self.is_recomputed(value))


def hold(graph: CapturedBackward, device: str, change: MemoryChange) -> HeldGraph:
    """The graph with the change; `device` is the kind of device, whose autocast has its own
    lists."""
    if change.autocast and change.fused_attention:
        graph = with_fused_attention(graph, change.fused_attention)
    rules = autocast_rules(graph, device) if change.autocast else None
    widths = present_widths(graph)
    if rules is not None:
        widths = autocast_widths(graph, rules, change.wide_reads)
    is_bf16 = rules is not None and change.autocast_dtype == "bf16"
    halves = find_halves(graph, rules) if rules is not None and is_bf16 else frozenset()
    values = _SavedReader(graph, widths, rules, device, halves).values()
    if change.fuse:
        values = [value for value in values if not _is_fusible(graph, value)]
    block = block_of_nodes(graph) if change.recompute else [OUTSIDE] * len(graph.nodes)
    held = HeldGraph(
        graph=graph,
        widths=widths,
        rules=rules,
        values=values,
        block=block,
        change=change,
        device=device,
    )
    if not change.recompute:
        return held
    return msgspec.structs.replace(held, values=[*values, *_block_inputs(held)])


class _SavedReader:
    """Reads every saved tensor of a graph in the widths given."""

    def __init__(
        self,
        graph: CapturedBackward,
        widths: list[list[int]],
        rules: list[AutocastRule] | None,
        device: str,
        halves: frozenset[int],
    ) -> None:
        """`rules` are autocast's, one for every node; None without autocast. `halves` are nodes
        whose results are fp16 where products run in bf16."""
        self.halves = halves
        self.graph, self.widths, self.rules, self.device = graph, widths, rules, device
        self.copies: list[HeldValue] = []
        self.casts: dict[int, tuple[int, list[int]]] = {}  # weight storages: bytes, holders
        self.shared: dict[int, tuple[float, int, list[int]]] = {}  # width share, producer, holders

    def values(self) -> list[HeldValue]:
        for place, node in enumerate(self.graph.nodes):
            for saved in node.saved:
                self._read(place, node, saved)
        shared = [
            HeldValue(
                size_bytes=round(self.graph.storages[storage].size_bytes * share),
                holders=tuple(holders),
                producer=producer,
            )
            for storage, (share, producer, holders) in self.shared.items()
        ]
        casts = [
            HeldValue(size_bytes=size, holders=tuple(holders), grows=False)
            for size, holders in self.casts.values()
        ]
        return [*shared, *self.copies, *casts]

    def _read(self, place: int, node: GraphNode, saved: GraphSaved) -> None:
        storage = self.graph.storages[saved.storage]
        rule = self.rules[place] if self.rules else AutocastRule.WIDEST
        given = not is_result(saved.field)
        if storage.kind == "state":
            if rule == AutocastRule.NARROW and given and saved.dtype == _FLOAT:
                cast = self.casts.setdefault(saved.storage, (storage.size_bytes // 2, []))
                cast[1].append(place)
            return
        producer, width = self._source(place, node, saved)
        wanted = {AutocastRule.NARROW: NARROW, AutocastRule.FULL: FULL}.get(rule, width)
        if (
            given
            and saved.dtype == _FLOAT
            and (wanted != width or self._is_cast_to_bf16(place, producer))
        ):
            copy = HeldValue(
                size_bytes=saved.elements * wanted,
                holders=(place,),
                producer=producer,
                is_copy=True,
            )
            self.copies.append(copy)
        elif storage.kind == "activation":
            share = width / FULL if saved.dtype == _FLOAT else self._share_of_bytes(node, saved)
            before = self.shared.get(saved.storage, (0.0, UNKNOWN, []))
            producer = producer if producer != UNKNOWN else before[1]
            self.shared[saved.storage] = (max(share, before[0]), producer, [*before[2], place])

    def _is_cast_to_bf16(self, place: int, producer: int) -> bool:
        """Whether a product reads a value in fp16; recurrent layers take it as it is."""
        is_product = self.rules is not None and self.rules[place] == AutocastRule.NARROW
        return is_product and producer in self.halves and place not in self.halves

    def _share_of_bytes(self, node: GraphNode, saved: GraphSaved) -> float:
        """A recurrent layer's reserve has no dtype, but holds what the layer computes in."""
        reserve = (
            self.rules is not None and "rnn" in operator_of(node.name) and saved.dtype == "uint8"
        )
        return NARROW / FULL if reserve else 1.0

    def _source(self, place: int, node: GraphNode, saved: GraphSaved) -> tuple[int, int]:
        """The node that made a saved tensor, and the bytes of its elements."""
        if is_result(saved.field):
            # The gates of a recurrent cell are as wide as its result.
            as_wide = saved.field in RESULTS or is_recurrent_cell(node.name)
            return place, self.widths[place][0] if as_wide and self.widths[place] else FULL
        edges = [
            edge
            for edge in node.inputs
            if edge.node >= 0
            and not self.graph.nodes[edge.node].is_leaf
            and edge.output < len(self.graph.nodes[edge.node].outputs)
            and self.graph.nodes[edge.node].outputs[edge.output].elements == saved.elements
        ]
        if not edges:
            # On a CPU dropout multiplies with a mask in the dtype of its input.
            follows = (
                self.device == "cpu" and operator_of(node.name) == "mul" and saved.elements > 1
            )
            own = self.widths[place][0] if follows and self.widths[place] else FULL
            return UNKNOWN, own
        edge = edges[-1] if saved.field in ("other", "mat2", "value", "batch2") else edges[0]
        return maker_of(self.graph, edge.node), self.widths[edge.node][edge.output]


def maker_of(graph: CapturedBackward, place: int) -> int:
    """Through views, to the node that computed a value."""
    node = graph.nodes[place]
    while operator_of(node.name) in VIEWS and node.inputs and node.inputs[0].node >= 0:
        if graph.nodes[node.inputs[0].node].is_leaf:
            break
        place = node.inputs[0].node
        node = graph.nodes[place]
    return place


def is_of_parameter(graph: CapturedBackward, place: int) -> bool:
    """Whether a node's result is a parameter, or a view of one."""
    node = graph.nodes[place]
    while not node.is_leaf:
        if operator_of(node.name) not in VIEWS or not node.inputs or node.inputs[0].node < 0:
            return False
        node = graph.nodes[node.inputs[0].node]
    return True


def _is_fusible(graph: CapturedBackward, value: HeldValue) -> bool:
    """Whether a compiled backward computes it again from what products returned."""
    if value.producer == UNKNOWN:
        return False
    return not is_product(graph.nodes[value.producer].name)


def _block_inputs(held: HeldGraph) -> list[HeldValue]:
    """What recomputed blocks are given and nobody else keeps for them."""
    graph = held.graph
    kept = {value.producer for value in held.values if not held.is_recomputed(value)}
    holders: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for place, node in enumerate(graph.nodes):
        for edge in node.inputs if held.block[place] != OUTSIDE else ():
            if edge.node < 0 or graph.nodes[edge.node].is_leaf:
                continue
            maker, outputs = maker_of(graph, edge.node), graph.nodes[edge.node].outputs
            outside = held.block[maker] != held.block[place] and maker not in kept
            if outside and edge.output < len(outputs):
                holders.setdefault(maker, []).append(place)
                sizes[maker] = outputs[edge.output].elements * held.widths[edge.node][edge.output]
    return [
        HeldValue(size_bytes=sizes[maker], holders=tuple(places), producer=maker)
        for maker, places in holders.items()
    ]
