"""Read a captured backward graph with a change made: how wide each result is under autocast,
what is saved for backward, and which blocks are recomputed.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from enum import IntEnum, auto
from functools import cache
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from stepscope.records.dtypes import NAME_BYTES
from stepscope.records.memory import (
    CapturedBackward,
    GraphModule,
    GraphNode,
    GraphSaved,
    GraphStorage,
)

if TYPE_CHECKING:
    Value = tuple[int, int]

# What a backward graph keeps: each value with its size, and the nodes that keep it.
#
# Under autocast a product keeps a cast copy of an input that is wider than its dtype, one for every
# call; weights are cast once. An operator that runs in fp32 keeps a wide copy of a narrow input.
# Whatever nobody keeps any more is released when forward is done with it.

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
        # A compiled backward computes again, from what products returned, all that others made.
        values = [
            value
            for value in values
            if value.producer == UNKNOWN or is_product(graph.nodes[value.producer].name)
        ]
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
        # A product casts what it reads in fp16 to bf16; recurrent layers take it as it is.
        from_half = producer in self.halves and place not in self.halves
        is_cast = wanted != width or (rule == AutocastRule.NARROW and from_half)
        if given and saved.dtype == _FLOAT and is_cast:
            copy = HeldValue(
                size_bytes=saved.elements * wanted,
                holders=(place,),
                producer=producer,
                is_copy=True,
            )
            self.copies.append(copy)
        elif storage.kind == "activation":
            share = width / FULL if saved.dtype == _FLOAT else 1.0
            if self.rules and saved.dtype == "uint8" and "rnn" in operator_of(node.name):
                share = NARROW / FULL  # a recurrent layer's reserve holds what it computes in
            before = self.shared.get(saved.storage, (0.0, UNKNOWN, []))
            producer = producer if producer != UNKNOWN else before[1]
            self.shared[saved.storage] = (max(share, before[0]), producer, [*before[2], place])

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


# How wide each result of a backward graph would be under autocast.
#
# PyTorch's lists decide: products run in the narrow dtype, some operators in fp32, the others in
# the widest dtype of their inputs. A parameter is fp32, so whatever it is added to or multiplied
# with by an operator of the last kind becomes fp32. So does what the script itself asks for in
# fp32, unless that was fp32 already and meets narrow values: such a script says
# `share.to(x.dtype)`, which an fp32 trace shows as a request for fp32.

FULL, NARROW = 4, 2  # bytes of an element


class _ReadValue(msgspec.Struct, frozen=True, kw_only=True):
    elements: int
    width: int
    is_cast: bool  # by the script, though it is fp32 already


class AutocastRule(IntEnum):
    WIDEST = auto()  # the widest dtype of its inputs
    FIRST = auto()  # the dtype of its first input, whatever its weights are
    NARROW = auto()
    FULL = auto()


_PRODUCT = re.compile(
    r"(addmm|mm|bmm|baddbmm|addbmm|addmv|mv|linear|prelu(kernel)?|.*convolution\w*|"
    r"(mkldnn|cudnn|miopen|mps)?(linear|conv\w*)|(cudnn|miopen)rnn|mkldnnrnnlayer|"
    r"thnnfused(lstm|gru)cell|scaleddotproduct\w*|.*flashattention\w*|.*efficientattention\w*)"
)
_LOSSES = (
    r"nllloss\w*|kldiv|l1loss|smoothl1loss|huberloss|mseloss|softmarginloss|multimarginloss|"
    r"binarycrossentropy\w*|ctcloss|cudnnctcloss|logsoftmax|cdist\w*|pdist\w*|prod"
)
# What CUDA's list has besides the losses; the CPU's list has none of it.
_FULL_ON_DEVICE = (
    r"exp|expm1|log|log10|log2|log1p|reciprocal|rsqrt|sinh|cosh|tan|acos|asin|erfinv|pow|softplus|"
    r"nativelayernorm|nativegroupnorm|fusedrmsnorm|norm|linalgvectornorm|linalgmatrixnorm|dist|"
    r"renorm|softmax|cumsum|cumprod|sum"
)
_FIRST = r"nativebatchnorm|cudnnbatchnorm|miopenbatchnorm|nativelayernorm|nativegroupnorm"
_ATTENTION = "safesoftmax"
_RECURRENT = re.compile(r"(cudnn|miopen)rnn")
_LIKELIHOOD = re.compile(r"nllloss\w*")
_BACKWARD = re.compile(r"Backward\w*$")
# Results that are only another look at the input, so that both share one storage.
VIEWS = frozenset(
    (
        *("t", "view", "unsafeview", "reshapealias", "reshape", "transpose", "permute", "alias"),
        *("squeeze", "unsqueeze", "asstrided", "slice", "select", "split", "splitwithsizes"),
        *("unbind", "expand", "detach", "unsafesplit", "chunk", "narrow", "viewasreal"),
    )
)
# Tensors that a node keeps of its own results, in the dtype that it computes in.
RESULTS = ("result", "result0", "output", "out")
_OTHER_RESULTS = re.compile(r"result\d+|logsumexp|philox\w*|rng\w*|cum_seq\w*|save\w*|total_weight")


@cache
def operator_of(name: str) -> str:
    """NativeLayerNormBackward0 is nativelayernorm."""
    return _BACKWARD.sub("", name).rpartition("::")[2].lower()


def is_product(name: str) -> bool:
    return _PRODUCT.fullmatch(operator_of(name)) is not None


def is_recurrent_cell(name: str) -> bool:
    return operator_of(name).startswith("thnnfused")


def is_result(field: str) -> bool:
    """Whether a node keeps this of what it returned, and not of what it was given."""
    return field in RESULTS or _OTHER_RESULTS.fullmatch(field) is not None


@cache
def rule_of(name: str, device: str) -> AutocastRule:
    operator = operator_of(name)
    if _PRODUCT.fullmatch(operator):
        return AutocastRule.NARROW
    full = _LOSSES if device == "cpu" else f"{_LOSSES}|{_FULL_ON_DEVICE}"
    if re.fullmatch(full, operator):
        return AutocastRule.FULL
    return AutocastRule.FIRST if re.fullmatch(_FIRST, operator) else AutocastRule.WIDEST


def present_widths(graph: CapturedBackward) -> list[list[int]]:
    """Bytes of an element of every result of every node, as captured."""
    return [[NAME_BYTES.get(out.dtype, 1) for out in node.outputs] for node in graph.nodes]


def autocast_rules(graph: CapturedBackward, device: str) -> list[AutocastRule]:
    """One rule for every node."""
    rules = [rule_of(node.name, device) for node in graph.nodes]
    for place in _find_attention_products(graph):
        rules[place] = AutocastRule.FULL
    for node in graph.nodes if device != "cpu" else ():
        # Inside a cross entropy, log_softmax is told to keep its input's dtype, which CUDA's
        # autocast respects; only the loss after it runs in fp32.
        before = node.inputs[0].node if node.inputs else -1
        is_loss = before >= 0 and _LIKELIHOOD.fullmatch(operator_of(node.name))
        if is_loss and operator_of(graph.nodes[before].name) == "logsoftmax":
            rules[before] = AutocastRule.WIDEST
    return rules


def autocast_widths(
    graph: CapturedBackward,
    rules: list[AutocastRule],
    wide_reads: frozenset[tuple[int, int]] = frozenset(),
) -> list[list[int]]:
    """Bytes of an element of every result under autocast; only results in fp32 can change.
    `wide_reads` are inputs, by node and number, that the script asks for in fp32."""
    widths = present_widths(graph)
    matching: set[Value] = set()  # fp32 values that the script casts, and views of them
    readers = Counter((edge.node, edge.output) for node in graph.nodes for edge in node.inputs)
    for place, node in enumerate(graph.nodes):
        if node.is_leaf or "ToCopy" in node.name:
            continue
        asked = {number for at, number in wide_reads if at == place} if wide_reads else set()
        read = _values_read(graph, node, widths, asked, matching, readers)
        width = _width(read, rules[place])
        if operator_of(node.name) in VIEWS and read and read[0].is_cast and width == FULL:
            matching.update((place, number) for number in range(len(node.outputs)))
        for number, out in enumerate(node.outputs):
            if out.dtype == "float32":
                widths[place][number] = width
    return widths


def find_halves(graph: CapturedBackward, rules: list[AutocastRule]) -> frozenset[int]:
    """Nodes whose results are fp16, though autocast's dtype is bf16: cuDNN's recurrent layers, for
    which autocast knows fp16 alone, and what only passes their values on."""
    halves: set[int] = set()
    for place, node in enumerate(graph.nodes):
        read = [edge.node for edge in node.inputs if edge.node >= 0]
        passes = rules[place] == AutocastRule.WIDEST and bool(read) and halves.issuperset(read)
        if passes or _RECURRENT.fullmatch(operator_of(node.name)):
            halves.add(place)
    return frozenset(halves)


def _find_attention_products(graph: CapturedBackward) -> set[int]:
    """Attention that no fused kernel took: PyTorch computes it in fp32, whatever it is given.

    Its softmax has a name of its own. The product before it and the one after it belong to it.
    """
    inside = {
        place for place, node in enumerate(graph.nodes) if operator_of(node.name) == _ATTENTION
    }
    products: set[int] = set()
    following = set(inside)
    for place, node in enumerate(graph.nodes):
        if following.isdisjoint(edge.node for edge in node.inputs) or place in inside:
            continue
        (products if is_product(node.name) else following).add(place)
    for place in inside:
        todo = [edge.node for edge in graph.nodes[place].inputs]
        while todo:
            before = todo.pop()
            if before < 0 or graph.nodes[before].is_leaf:
                continue
            if is_product(graph.nodes[before].name):
                products.add(before)
            else:
                todo += [edge.node for edge in graph.nodes[before].inputs]
    return products | inside


def _values_read(
    graph: CapturedBackward,
    node: GraphNode,
    widths: list[list[int]],
    asked: set[int],
    matching: set[Value],
    readers: Counter[Value],
) -> list[_ReadValue]:
    """`asked` are inputs that the script casts to fp32. If a value has several readers, some of
    them may read it as it was before the cast."""
    values = []
    for number, edge in enumerate(node.inputs):
        if edge.node < 0 or edge.output >= len(widths[edge.node]):
            continue
        width, made = widths[edge.node][edge.output], (edge.node, edge.output)
        is_cast = (number in asked and readers[made] == 1) or made in matching
        value = _ReadValue(
            elements=graph.nodes[edge.node].outputs[edge.output].elements,
            width=FULL if number in asked else width,
            is_cast=width == FULL and is_cast,
        )
        values.append(value)
    return values


def _width(read: list[_ReadValue], rule: AutocastRule) -> int:
    if rule in (AutocastRule.NARROW, AutocastRule.FULL):
        return NARROW if rule == AutocastRule.NARROW else FULL
    if not read:
        return FULL
    if rule == AutocastRule.FIRST:
        return read[0].width
    # A number does not widen a tensor.
    sized = [value for value in read if value.elements > 1] or read[:1]
    others = [value.width for value in sized if not value.is_cast]
    return min(FULL, max(others or [value.width for value in sized]))


# Which blocks of a model would be recomputed: by transformers' own mark, else repeated modules.

_FEWEST = 3  # modules of one type in one list
OUTSIDE = -1


def find_block_paths(modules: Sequence[GraphModule]) -> list[str]:
    """Those that transformers checkpoints, outermost; else the type of composed module that stands
    several times in one list and holds the most parameters, of equals the outer ones."""
    marked = [module.path for module in modules if module.recomputes]
    if marked:
        outer = tuple(f"{path}." for path in marked)
        return [path for path in marked if not path.startswith(outer)]
    lists: dict[tuple[str, str], list[GraphModule]] = defaultdict(list)
    parents = {module.path.rpartition(".")[0] for module in modules}
    for module in modules:
        lists[module.path.rpartition(".")[0], module.type].append(module)
    repeated = [
        blocks
        for blocks in lists.values()
        if len(blocks) >= _FEWEST and any(block.path in parents for block in blocks)
    ]
    held = [sum(block.elements for block in blocks) for blocks in repeated]
    if not held or not max(held):
        return []
    return [block.path for block in repeated[held.index(max(held))]]


def block_of_nodes(graph: CapturedBackward) -> list[int]:
    """The number of each node's block, OUTSIDE for none."""
    numbers = {path: number for number, path in enumerate(find_block_paths(graph.modules))}
    of_module = []
    for module in graph.modules:
        path = module.path
        while path and path not in numbers:
            path = path.rpartition(".")[0]
        of_module.append(numbers.get(path, OUTSIDE) if path else OUTSIDE)
    blocks = [of_module[node.module] if node.module >= 0 else OUTSIDE for node in graph.nodes]
    # A module that several blocks share, such as one activation for all, has a single path, which
    # may lie outside of them. A node between two of the same block was made inside it.
    whole = list(blocks)
    before = OUTSIDE
    waiting: list[int] = []  # nodes since the last one of a block
    for place, block in enumerate(blocks):
        if graph.nodes[place].is_leaf:
            continue
        if block == OUTSIDE:
            waiting.append(place)
            continue
        if block == before:
            for inner in waiting:
                whole[inner] = block
        before, waiting = block, []
    return whole


# A backward graph in which attention of single operators is one fused node.
#
# Fused attention keeps query, key, value and its result, and a sum for each row of scores; the
# scores themselves are computed again in backward.

_NAME = "ScaledDotProductFlashAttentionBackward0"
_FIELDS = ("query", "key", "value")


def with_fused_attention(
    graph: CapturedBackward, calls: Sequence[Sequence[int]]
) -> CapturedBackward:
    """`calls` are the nodes of each attention, in forward's order; the last one becomes the fused
    node, and the others are left without work."""
    nodes, storages = list(graph.nodes), list(graph.storages)
    for call in calls:
        # What comes into it from outside: the query, then the key and the value.
        edges = [edge for place in call for edge in graph.nodes[place].inputs]
        outside = [edge for edge in edges if edge.node >= 0 and edge.node not in call]
        inputs = list({(edge.node, edge.output): edge for edge in outside}.values())
        if len(inputs) != len(_FIELDS):
            continue
        result = graph.nodes[call[-1]].outputs
        for place in call:
            nodes[place] = replace(nodes[place], inputs=[], saved=[], outputs=[])
        saved = []
        made = [graph.nodes[edge.node].outputs[edge.output] for edge in inputs]
        for field, value in zip((*_FIELDS, "result"), (*made, result[0]), strict=True):
            number, elements = len(storages), value.elements
            storages.append(GraphStorage(size_bytes=elements * FULL, kind="activation"))
            kept = GraphSaved(field=field, storage=number, elements=elements, dtype=_FLOAT)
            saved.append(kept)
        nodes[call[-1]] = GraphNode(
            name=_NAME,
            module=graph.nodes[call[-1]].module,
            outputs=result,
            inputs=inputs,
            saved=saved,
        )
    return replace(graph, nodes=nodes, storages=storages)


# Convolutions whose tensors are in torch's usual layout, which tensor cores do not read.

_GROUP_BYTES = 16  # of channels


class ConvolutionLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A dense convolution."""

    place: int  # its node
    inputs: int  # channels
    outputs: int
    strided: bool = False


def filled_up(channels: int, width: int) -> float:
    """A tensor with whole groups of channels, of `width` bytes each, over the tensor as it is."""
    group = max(1, _GROUP_BYTES // width)
    return math.ceil(channels / group) * group / max(1, channels)
