"""The mask of the largest elements that the gradient of a maximum is shared among.

PyTorch compares every element with the maximum and counts those that equal it. Its sum over the
mask first copies the mask to int64, before the gradient itself is made. No precision changes that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.predict.peak_memory.autocast_widths import operator_of

if TYPE_CHECKING:
    from stepscope.records.backward_graph import GraphNode

MASK_BYTES, COUNT_BYTES = 1, 8  # of an element
# A maximum along one dimension keeps indices instead of its input, and needs no mask.
_SHARING = ("amax", "amin", "max", "min", "median", "nanmedian")


def counted_elements(node: GraphNode) -> int:
    """How many elements backward compares and counts; 0 for other operators."""
    if operator_of(node.name) not in _SHARING:
        return 0
    return next((saved.elements for saved in node.saved if saved.field == "self"), 0)
