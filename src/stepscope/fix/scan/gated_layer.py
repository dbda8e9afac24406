"""One layer of a GRU or an LSTM whose backward pass is a scan: a torch operator of its own.

`gated_layer` computes the states as torch does (cuDNN on a GPU) and keeps them alone, and an LSTM's
cell states. Its gradient is `gated_layer_backward`. Both are custom operators with shapes for
torch.compile; a second derivative is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepscope.fix.scan.exact_products import exact_products
from stepscope.fix.scan.gated_cells import (
    GatedWeights,
    GruSteps,
    LstmSteps,
    lstm_cells,
    states_before,
)
from stepscope.fix.scan.rnn_layer import MOST_STEPS, no_warning
from stepscope.fix.scan.second_derivative import refuse_second_derivative
from stepscope.fix.scan.step_jacobians import backward_rows

_PIECE_ROWS = 2048


@torch.library.custom_op("stepscope::gated_layer", mutates_args=())
def gated_layer(
    inputs: Tensor,
    initial: Tensor,
    weight_input: Tensor,
    weight: Tensor,
    bias_input: Tensor | None,
    bias: Tensor | None,
    cell: str,
) -> tuple[Tensor, Tensor]:
    """All states and, of an LSTM, all cell states (else empty), [steps, batch, size].

    `initial` is [batch, size]; of an LSTM [batch, 2 x size], the cell's behind the output's.
    """
    weights = GatedWeights(weight_input, weight, bias_input, bias)
    size = weight.shape[-1]
    with torch.no_grad():
        states, last_cell = _states(inputs, initial, weights, cell)
        if last_cell is None:
            return states, states.new_empty(0)
        first, first_cell = initial.split(size, -1)
        with exact_products(inputs.device):
            before = states_before(first, states)
            cells = lstm_cells(
                _wide(inputs), _wide(before), _wide(first_cell), _wide_weights(weights)
            ).to(states.dtype)
        cells[-1] = last_cell
    return states, cells


@gated_layer.register_fake
def _(inputs: Tensor, initial: Tensor, weight_input: Tensor, weight: Tensor, *rest: Any) -> Any:
    shape = (inputs.shape[0], inputs.shape[1], weight.shape[-1])
    return inputs.new_empty(shape), inputs.new_empty(shape if rest[-1] == "lstm" else 0)


def _states(
    inputs: Tensor, initial: Tensor, weights: GatedWeights, cell: str
) -> tuple[Tensor, Tensor | None]:
    """As torch computes them, in as many calls as cuDNN needs, and an LSTM's last cell state."""
    given = [one for one in weights if one is not None]
    options = (given, len(given) > 2, 1, 0.0, False, False, False)
    state = tuple(one.unsqueeze(0).contiguous() for one in initial.split(weights[1].shape[-1], -1))
    pieces = []
    with no_warning(given):
        for piece in inputs.split(MOST_STEPS):
            if cell == "gru":
                states, *last = torch.gru(piece, state[0], *options)
            else:
                states, *last = torch.lstm(piece, state, *options)
            state = tuple(last)
            pieces.append(states)
    joined = pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)
    return joined, state[1].squeeze(0) if cell == "lstm" else None


@torch.library.custom_op("stepscope::gated_layer_backward", mutates_args=())
def gated_layer_backward(
    gradient: Tensor,
    gradient_of_cells: Tensor | None,
    states: Tensor,
    cells: Tensor,
    inputs: Tensor,
    initial: Tensor,
    weight_input: Tensor,
    weight: Tensor,
    bias_input: Tensor | None,
    bias: Tensor | None,
    cell: str,
    wants_inputs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of inputs (empty if not wanted), initial state, both weights and both biases."""
    kind = states.dtype
    weights = _wide_weights(GatedWeights(weight_input, weight, bias_input, bias))
    features = _wide(inputs)
    with torch.no_grad(), exact_products(inputs.device):
        before, steps = _steps(features, _wide(states), _wide(cells), _wide(initial), weights, cell)
        own = _own_gradients(gradient, gradient_of_cells, cell)
        reached, left = backward_rows(own, steps.jacobians(weights.recurrent))
        gates = steps.gate_gradients(reached)
        rows, rows_of_states = gates.of_inputs.flatten(0, 1), gates.of_states.flatten(0, 1)
        found = (
            gates.of_inputs @ weights.input if wants_inputs else features.new_empty(0),
            left,
            _sum_over_rows(rows, features.flatten(0, 1)),
            _sum_over_rows(rows_of_states, before.flatten(0, 1)),
            rows.sum(0),
            rows_of_states.sum(0),
        )
    of_inputs, of_initial, of_weight_input, of_weight, of_bias_input, of_bias = (
        one.to(kind) for one in found
    )
    return of_inputs, of_initial, of_weight_input, of_weight, of_bias_input, of_bias


@gated_layer_backward.register_fake
def _(*given: Any) -> Any:
    inputs, initial, weight_input, weight = given[4:8]
    return (
        torch.empty_like(inputs) if given[-1] else inputs.new_empty(0),
        torch.empty_like(initial),
        torch.empty_like(weight_input),
        torch.empty_like(weight),
        weight.new_empty(weight.shape[0]),
        weight.new_empty(weight.shape[0]),
    )


def _steps(
    inputs: Tensor, states: Tensor, cells: Tensor, initial: Tensor, weights: GatedWeights, cell: str
) -> tuple[Tensor, GruSteps | LstmSteps]:
    """The states before each step, and what each step does to a gradient."""
    if cell == "gru":
        before = states_before(initial, states)
        return before, GruSteps.of(inputs, before, weights)
    first, first_cell = initial.chunk(2, -1)
    before, cells_before = states_before(first, states), states_before(first_cell, cells)
    return before, LstmSteps.of(inputs, before, cells, cells_before, weights)


def _own_gradients(gradient: Tensor, of_cells: Tensor | None, cell: str) -> Tensor:
    if cell == "gru":
        return _wide(gradient).contiguous()
    if of_cells is None:
        of_cells = torch.zeros_like(gradient)
    return torch.cat([_wide(gradient), _wide(of_cells)], -1)


def _sum_over_rows(left: Tensor, right: Tensor) -> Tensor:
    """left.t() @ right: on a GPU in pieces, because one small product of half a million rows keeps
    few multiprocessors busy."""
    pieces = len(left) // _PIECE_ROWS
    if not left.is_cuda or pieces < 2:
        return left.t() @ right
    whole = pieces * _PIECE_ROWS
    by_piece = torch.bmm(
        left[:whole].unflatten(0, (pieces, -1)).transpose(1, 2),
        right[:whole].unflatten(0, (pieces, -1)),
    )
    return by_piece.sum(0) + left[whole:].t() @ right[whole:]


def _wide(values: Tensor) -> Tensor:
    """16 bits hold neither products of many Jacobians nor their powers of two."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _wide_weights(weights: GatedWeights) -> GatedWeights:
    return GatedWeights(*(None if one is None else _wide(one) for one in weights))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *given, cell = inputs
    ctx.save_for_backward(*output, *given)
    ctx.set_materialize_grads(False)
    ctx.cell = cell


def _backward(
    ctx: Any, gradient: Tensor | None, gradient_of_cells: Tensor | None
) -> tuple[Tensor | None, ...]:
    states, cells, *given = ctx.saved_tensors
    if gradient is None:
        gradient = torch.zeros_like(states)
    wants_inputs = ctx.needs_input_grad[0]
    of_inputs, *others, of_bias_input, of_bias = gated_layer_backward(
        gradient, gradient_of_cells, states, cells, *given, ctx.cell, wants_inputs
    )
    biases = (of_bias_input, of_bias) if given[-1] is not None else (None, None)
    return (of_inputs if wants_inputs else None, *others, *biases, None)


gated_layer.register_autograd(_backward, setup_context=_keep)
gated_layer_backward.register_autograd(refuse_second_derivative)
