"""Recurrent layers that a library runs as one operator.

Every row of the input (time x batch) meets every weight matrix once. Layers that PyTorch runs step
by step are made of matrix products, which count as such.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stepscope.explain.flops.call import Call, Tensor, Unknown
from stepscope.explain.flops.cost import Cost, matmul_like
from stepscope.explain.flops.matmul import moved_by

if TYPE_CHECKING:
    from stepscope.explain.flops.cost import Formula

_GATES = {0: 1, 1: 1, 2: 4, 3: 3}  # relu, tanh, lstm, gru, as cuDNN and MIOpen number them


def _rows(given: Tensor) -> int:
    """Time x batch, packed or not."""
    return math.prod(given.dims[:-1])


def _weights(call: Call, given: Tensor, mode_at: int, *, projects: bool) -> int:
    """Elements of all weight matrices: from their shapes, else by mode, width and depth."""
    shapes = call.tensor_list(1)
    if shapes and any(len(dims) == 2 for dims in shapes):
        return sum(math.prod(dims) for dims in shapes if len(dims) == 2)
    mode, hidden = call.number(mode_at), call.number(mode_at + 1)
    shift = 1 if projects else 0
    projected = call.number(mode_at + 2) if projects else 0
    layers, both = call.number(mode_at + 2 + shift), call.flag(mode_at + 6 + shift)
    if mode not in _GATES:
        raise Unknown
    sides, out = 1 + both, projected or hidden
    wide = [given.dims[-1], *([sides * out] * (layers - 1))]
    one_side = sum(_GATES[mode] * hidden * (width + out) for width in wide)
    return sides * (one_side + layers * projected * hidden)


def _whole(mode_at: int, *, projects: bool) -> Formula:
    def formula(call: Call) -> Cost:
        given = call.tensor(0)
        weights = _weights(call, given, mode_at, projects=projects)
        return Cost(flops=2 * _rows(given) * weights)

    return formula


def _whole_backward(mode_at: int, *, projects: bool) -> Formula:
    """Gradients of the states and of the weights cost a forward pass each. That of the input is
    part of the first and is left out where nobody needs it because the input is data."""
    mask_at = mode_at + 10 + projects

    def formula(call: Call) -> Cost:
        given = call.tensor(0)
        weights = _weights(call, given, mode_at, projects=projects)
        asked = call.flags(mask_at) if call.has_value(mask_at) else [True] * 4
        used = weights * (1 + asked[3])
        if not asked[0]:
            used -= _input_weights(call, given, mode_at, projects=projects)
        return Cost(flops=2 * _rows(given) * used)

    return formula


def _input_weights(call: Call, given: Tensor, mode_at: int, *, projects: bool) -> int:
    """Elements of the matrices that the input itself meets: the first layer's."""
    mode, hidden = call.number(mode_at), call.number(mode_at + 1)
    if mode not in _GATES:
        raise Unknown
    both = call.flag(mode_at + 6 + projects)
    return (1 + both) * _GATES[mode] * hidden * given.dims[-1]


matmul_like("aten::_cudnn_rnn")(_whole(6, projects=True))
matmul_like("aten::_cudnn_rnn_backward")(_whole_backward(10, projects=True))
matmul_like("aten::miopen_rnn")(_whole(5, projects=False))
matmul_like("aten::miopen_rnn_backward")(_whole_backward(10, projects=False))


@matmul_like("aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward")
def mkldnn(call: Call) -> Cost:
    """One layer in one direction: input, weight of the input, weight of the state, biases."""
    given, below, before = call.tensor(0), call.tensor(1), call.tensor(2)
    if below.dims[-1] != given.dims[-1]:
        raise Unknown
    times = 2 if call.name.endswith("_backward") else 1
    rows = _rows(given)
    return Cost(
        flops=times * 2 * rows * (below.elements + before.elements),
        moved=times * moved_by((given, below, before), rows * before.dims[-1]),
    )
