"""What cuDNN needs beside the tensors of a convolution.

Tensor cores want channels last, in groups of 16 bytes. Tensors in torch's usual layout are copied
for them: input and result in forward; in backward the gradient of the result, the input and its
gradient. Kernels for plain fp32 take torch's layout, but some transform all tensors first
(Winograd, Fourier): cuDNN chooses by shape, so another batch may need another algorithm.

The backward of a convolution's backward (a penalty on gradients) gets the weight's gradient from a
convolution over the samples: both tensors are copied with samples and channels exchanged first, in
any precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.predict.peak_memory.autocast_widths import NARROW, WIDTHS, operator_of
from stepscope.predict.peak_memory.convolution_layout import filled_up

if TYPE_CHECKING:
    from stepscope.predict.peak_memory.held_values import HeldGraph
    from stepscope.records.backward_graph import GraphNode

_INPUT, _WEIGHT, _RESULT_GRADIENT = "input", "weight", "grad_output"
_SECOND_BACKWARD = "ConvolutionBackwardBackward"
# Bytes of cuDNN's Fourier transforms over those of the tensors: tiles of 32 x 32 points become 17
# columns of complex numbers, a filter of 3 x 3 taps a whole tile, a small map at most three times
# its size, beside a copy of it.
_TRANSFORMED_FILTERS, _TRANSFORMED_MAPS = 32 * 17 * 8 / (9 * 4), 4.0


def is_convolution(name: str) -> bool:
    return "convolution" in operator_of(name)


def layout_copies_bytes(held: HeldGraph, place: int, *, backward: bool) -> float:
    """0 if the convolution takes its tensors as they are."""
    layout = next((one for one in held.change.layout_copies if one.place == place), None)
    if layout is None:
        return 0.0
    given, result, weight = _tensor_bytes(held, place)
    is_second = _SECOND_BACKWARD in held.graph.nodes[place].name
    exchanged = given + result
    given *= filled_up(layout.inputs, held.widths[place][0])
    result *= filled_up(layout.outputs, held.widths[place][0])
    if is_second and backward:
        return exchanged + given + result
    edges = held.graph.nodes[place].inputs
    # What the second backward belongs to is a backward too, and runs when the graph is made.
    twice = is_second or (backward and bool(edges) and edges[0].node >= 0)
    return (1.0 + twice) * (given + weight) + result


def transforms_bytes(held: HeldGraph, place: int) -> float:
    """The workspace of a Fourier transform: what another algorithm may need."""
    given, result, weight = _tensor_bytes(held, place)
    return _TRANSFORMED_MAPS * (given + result) + _TRANSFORMED_FILTERS * weight


def _tensor_bytes(held: HeldGraph, place: int) -> tuple[float, float, float]:
    """Of its input, its result and its weight."""
    node, grown = held.graph.nodes[place], held.change.batch
    given, weight, gradient = (
        _saved_bytes(node, name, narrow=held.rules is not None)
        for name in (_INPUT, _WEIGHT, _RESULT_GRADIENT)
    )
    result = gradient or sum(out.elements for out in node.outputs) * held.widths[place][0]
    return given * grown, result * grown, weight


def _saved_bytes(node: GraphNode, field: str, *, narrow: bool) -> float:
    for saved in node.saved:
        if saved.field == field:
            width = WIDTHS.get(saved.dtype, 1)
            return saved.elements * (min(NARROW, width) if narrow else width)
    return 0.0
