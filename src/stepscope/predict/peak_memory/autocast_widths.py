"""How wide each result of a backward graph would be under autocast.

PyTorch's lists decide: products run in the narrow dtype, some operators in fp32, the others in the
widest dtype of their inputs. A parameter is fp32, so whatever it is added to or multiplied with by
an operator of the last kind becomes fp32. So does what the script itself asks for in fp32, unless
that was fp32 already and meets narrow values: such a script says `share.to(x.dtype)`, which an fp32
trace shows as a request for fp32.
"""

from __future__ import annotations

import re
from collections import Counter
from enum import IntEnum, auto
from functools import cache
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from stepscope.records.backward_graph import CapturedBackward, GraphNode

    Value = tuple[int, int]  # a node, and which of its results

FULL, NARROW = 4, 2  # bytes of an element
WIDTHS = {
    **dict.fromkeys(("float64", "complex64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), FULL),
    **dict.fromkeys(("bfloat16", "float16", "int16"), NARROW),
    "complex128": 16,
}


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
    return [[WIDTHS.get(out.dtype, 1) for out in node.outputs] for node in graph.nodes]


def autocast_rules(graph: CapturedBackward, device: str) -> list[AutocastRule]:
    """One rule for every node."""
    rules = [rule_of(node.name, device) for node in graph.nodes]
    for place in _find_attention_products(graph):
        rules[place] = AutocastRule.FULL
    for place in _find_loss_softmaxes(graph) if device != "cpu" else ():
        rules[place] = AutocastRule.WIDEST
    return rules


def _find_loss_softmaxes(graph: CapturedBackward) -> set[int]:
    """Inside a cross entropy, log_softmax is told to keep its input's dtype, which CUDA's autocast
    respects; only the loss after it runs in fp32."""
    return {
        edge.node
        for node in graph.nodes
        if _LIKELIHOOD.fullmatch(operator_of(node.name))
        for edge in node.inputs[:1]
        if edge.node >= 0 and operator_of(graph.nodes[edge.node].name) == "logsoftmax"
    }


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
