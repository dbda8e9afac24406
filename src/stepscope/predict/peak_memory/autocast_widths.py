"""How wide each result of a backward graph would be under autocast.

PyTorch's lists decide: products run in the narrow dtype, some operators in fp32, the others in the
widest dtype of their inputs. A parameter is fp32, so whatever it is added to or multiplied with by
an operator of the last kind becomes fp32. So does what the script itself asks for in fp32.
"""

from __future__ import annotations

import re
from enum import IntEnum, auto
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.records.backward_graph import CapturedBackward, GraphNode

FULL, NARROW = 4, 2  # bytes of an element
WIDTHS = {
    **dict.fromkeys(("float64", "complex64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), FULL),
    **dict.fromkeys(("bfloat16", "float16", "int16"), NARROW),
    "complex128": 16,
}


class AutocastRule(IntEnum):
    WIDEST = auto()  # the widest dtype of its inputs
    FIRST = auto()  # the dtype of its first input, whatever its weights are
    NARROW = auto()
    FULL = auto()


_PRODUCT = re.compile(
    r"(addmm|mm|bmm|baddbmm|addbmm|addmv|mv|linear|prelu(kernel)?|.*convolution\w*|"
    r"(mkldnn|cudnn|miopen|mps)?(linear|conv\w*)|(cudnn|miopen)rnn|mkldnnrnnlayer|"
    r"scaleddotproduct\w*|.*flashattention\w*|.*efficientattention\w*)"
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
_LIKELIHOOD = re.compile(r"nllloss\w*")
_BACKWARD = re.compile(r"Backward\w*$")
# Tensors that a node keeps of its own results, in the dtype that it computes in.
RESULTS = ("result", "result0", "output", "out")
_OTHER_RESULTS = re.compile(r"result\d+|logsumexp|philox\w*|rng\w*|cum_seq\w*|save\w*|total_weight")


@cache
def operator_of(name: str) -> str:
    """NativeLayerNormBackward0 is nativelayernorm."""
    return _BACKWARD.sub("", name).rpartition("::")[2].lower()


def is_product(name: str) -> bool:
    return _PRODUCT.fullmatch(operator_of(name)) is not None


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
    for place, node in enumerate(graph.nodes):
        if node.is_leaf or "ToCopy" in node.name:
            continue
        asked = {number for at, number in wide_reads if at == place} if wide_reads else set()
        width = _width(graph, node, widths, rules[place], asked)
        for number, out in enumerate(node.outputs):
            if out.dtype == "float32":
                widths[place][number] = width
    return widths


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


def _width(
    graph: CapturedBackward,
    node: GraphNode,
    widths: list[list[int]],
    rule: AutocastRule,
    asked: set[int],
) -> int:
    """`asked` are inputs that the script has cast to fp32."""
    if rule in (AutocastRule.NARROW, AutocastRule.FULL):
        return NARROW if rule == AutocastRule.NARROW else FULL
    inputs = [
        (
            FULL if number in asked else widths[edge.node][edge.output],
            graph.nodes[edge.node].outputs[edge.output].elements,
        )
        for number, edge in enumerate(node.inputs)
        if edge.node >= 0 and edge.output < len(widths[edge.node])
    ]
    if not inputs:
        return FULL
    if rule == AutocastRule.FIRST:
        return inputs[0][0]
    # A number does not widen a tensor.
    sized = [width for width, elements in inputs if elements > 1] or [inputs[0][0]]
    return min(FULL, max(sized))
