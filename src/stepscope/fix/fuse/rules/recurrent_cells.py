"""One step of LSTM, GRU and RNN for all models, and its way back.

Tensors are [models, rows, width]. `gates` is the product of the step's input, its bias
added. `state` is the product of the state before; cells that only add the two get their sum as
`gates`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Tensors = tuple[torch.Tensor, ...]
    # The gradients of gates, of state, and of the states before without what went through state.
    WayBack = tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor | None, ...]]

_sigmoid_back = torch.ops.aten.sigmoid_backward
_tanh_back = torch.ops.aten.tanh_backward
_relu_back = torch.ops.aten.threshold_backward


class RecurrentCell(NamedTuple):
    """`states` are (h,), or (h, c) of an LSTM."""

    adds_products: bool
    # gates, state, states before -> the new states, and what the way back needs
    forward: Callable[[torch.Tensor, torch.Tensor, Tensors], tuple[Tensors, Tensors]]
    # gradients of the new states, states before, what was kept
    backward: Callable[[Tensors, Tensors, Tensors], WayBack]

    def step(
        self,
        gates: torch.Tensor,
        states: Tensors,
        turned: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> tuple[Tensors, Tensors]:
        """`turned` is the state's weight, [models, width, gates]."""
        if self.adds_products:
            sums = torch.baddbmm(gates, states[0], turned)
            return self.forward(sums, sums, states)
        if bias is None:
            return self.forward(gates, torch.bmm(states[0], turned), states)
        return self.forward(gates, torch.baddbmm(bias.unsqueeze(1), states[0], turned), states)


def _lstm(gates: torch.Tensor, _: torch.Tensor, states: Tensors) -> tuple[Tensors, Tensors]:
    i, f, g, o = gates.chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = torch.addcmul(i * g, f, states[1])
    bent = c.tanh()
    return (o * bent, c), (i, f, g, o, bent)


def _lstm_back(gradients: Tensors, states: Tensors, kept: Tensors) -> WayBack:
    (of_h, of_c), (i, f, g, o, bent) = gradients, kept
    of_c = of_c + _tanh_back(of_h * o, bent)
    parts = [
        _sigmoid_back(of_c * g, i),
        _sigmoid_back(of_c * states[1], f),
        _tanh_back(of_c * i, g),
        _sigmoid_back(of_h * bent, o),
    ]
    of_gates = torch.cat(parts, -1)
    return of_gates, of_gates, (None, of_c * f)


def _gru(gates: torch.Tensor, state: torch.Tensor, states: Tensors) -> tuple[Tensors, Tensors]:
    width = 2 * states[0].shape[-1]
    r, z = (gates[..., :width] + state[..., :width]).sigmoid().chunk(2, -1)
    recalled = state[..., width:]
    n = torch.addcmul(gates[..., width:], r, recalled).tanh()
    return (torch.addcmul(n, z, states[0] - n),), (r, z, n, recalled)


def _gru_back(gradients: Tensors, states: Tensors, kept: Tensors) -> WayBack:
    (of_h,), (r, z, n, recalled) = gradients, kept
    past = of_h * z
    of_n = _tanh_back(of_h - past, n)
    of_r = _sigmoid_back(of_n * recalled, r)
    of_z = _sigmoid_back(of_h * (states[0] - n), z)
    of_gates = torch.cat([of_r, of_z, of_n], -1)
    of_state = torch.cat([of_r, of_z, of_n * r], -1)
    return of_gates, of_state, (past,)


def _tanh(gates: torch.Tensor, _: torch.Tensor, __: Tensors) -> tuple[Tensors, Tensors]:
    h = gates.tanh()
    return (h,), (h,)


def _tanh_cell_back(gradients: Tensors, _: Tensors, kept: Tensors) -> WayBack:
    of_gates = _tanh_back(gradients[0], kept[0])
    return of_gates, of_gates, (None,)


def _relu(gates: torch.Tensor, _: torch.Tensor, __: Tensors) -> tuple[Tensors, Tensors]:
    h = gates.relu()
    return (h,), (h,)


def _relu_cell_back(gradients: Tensors, _: Tensors, kept: Tensors) -> WayBack:
    of_gates = _relu_back(gradients[0], kept[0], 0)
    return of_gates, of_gates, (None,)


CELLS = {
    "lstm": RecurrentCell(adds_products=True, forward=_lstm, backward=_lstm_back),
    "gru": RecurrentCell(adds_products=False, forward=_gru, backward=_gru_back),
    "rnn_tanh": RecurrentCell(adds_products=True, forward=_tanh, backward=_tanh_cell_back),
    "rnn_relu": RecurrentCell(adds_products=True, forward=_relu, backward=_relu_cell_back),
}
