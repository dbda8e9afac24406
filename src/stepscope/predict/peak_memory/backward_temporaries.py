"""What backward needs for a moment beside gradients, for operators whose formulas are known.

The gradient of a maximum is shared among the elements that equal it: PyTorch compares every
element, and its sum over the mask first copies the mask to int64, before the gradient is made. The
gradient of a softmax on a GPU begins with a product as large as the gradient. Neither depends on
what autocast makes narrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.predict.peak_memory.autocast_widths import operator_of

if TYPE_CHECKING:
    from stepscope.predict.peak_memory.held_values import HeldGraph
    from stepscope.records.backward_graph import GraphNode

_MASK_BYTES, _COUNT_BYTES = 1, 8  # of an element
# A maximum along one dimension keeps indices instead of its input, and needs no mask.
_SHARING = ("amax", "amin", "max", "min", "median", "nanmedian")
_SOFTMAX = ("softmax", "safesoftmax")


def before_gradient_bytes(held: HeldGraph, place: int) -> float:
    """While the gradient of the input is not there yet."""
    return _counted_elements(held, place) * (_MASK_BYTES + _COUNT_BYTES)


def beside_gradient_bytes(held: HeldGraph, place: int) -> float:
    """While the gradient of the input is computed."""
    return _counted_elements(held, place) * _MASK_BYTES + _product_bytes(held, place)


def _counted_elements(held: HeldGraph, place: int) -> float:
    """How many elements are compared and counted; 0 for other operators."""
    node = held.graph.nodes[place]
    if operator_of(node.name) not in _SHARING:
        return 0.0
    return held.change.batch * _saved_elements(node, "self")


def _product_bytes(held: HeldGraph, place: int) -> float:
    node = held.graph.nodes[place]
    if held.device == "cpu" or operator_of(node.name) not in _SOFTMAX or not held.widths[place]:
        return 0.0
    return held.change.batch * _saved_elements(node, "result") * held.widths[place][0]


def _saved_elements(node: GraphNode, field: str) -> int:
    return next((saved.elements for saved in node.saved if saved.field == field), 0)
