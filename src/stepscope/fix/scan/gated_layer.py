"""One layer of a GRU or an LSTM whose backward pass is a scan over the Jacobians of its
steps: a torch operator of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.fix.scan.affine_maps import (
    AffineMaps,
    carries,
    kernels_fit,
    refuse_second_derivative,
    rescaled,
    scan_pairs,
    wide,
)
from stepscope.fix.scan.rnn_layer import MOST_STEPS, no_warning

# What a GRU's and an LSTM's steps do to a gradient, for all steps at once.
#
# Gates are computed again from inputs and states: that is no chain. A cell gives the Jacobians of
# its steps and, from the gradients that reached the states, those of its gates.
# With a the gradient of a step's output, W the recurrent weights and ' the slope of an activation:
#
#     GRU    h = (1 - z) n + z h_before,   n = tanh(x_n + r q),   q = W_n h_before + b_n
#            a  ->  a z  +  (a (1-z) n' q r') W_r  +  (a (h_before - n) z') W_z  +  (a (1-z) n' r)
#            W_n
#
#     LSTM   h = o tanh(c),   c = f c_before + i g;   b is the gradient of c, s = o tanh'(c)
#            b  ->  (b + a s) f
#            a  ->  (b + a s) (g i' W_i + c_before f' W_f + i g' W_g)  +  a tanh(c) o' W_o


class GatedWeights(NamedTuple):
    """Weights as torch has them: the gates' rows one after the other."""

    input: Tensor
    recurrent: Tensor
    bias_input: Tensor | None
    bias_recurrent: Tensor | None


class GateGradients(NamedTuple):
    """[steps, batch, gates x size]: of the sums that inputs give to the gates, and states."""

    of_inputs: Tensor
    of_states: Tensor


class GruSteps(NamedTuple):
    """The slopes of a GRU's steps, [steps, batch, size] each."""

    reset: Tensor
    update: Tensor
    new: Tensor  # by way of the state
    new_input: Tensor
    forgotten: Tensor  # 1 - z

    @classmethod
    def of(cls, inputs: Tensor, before: Tensor, weights: GatedWeights) -> GruSteps:
        from_input = torch.nn.functional.linear(inputs, weights.input, weights.bias_input)
        from_state = torch.nn.functional.linear(before, weights.recurrent, weights.bias_recurrent)
        size = before.shape[-1]
        both = from_input[..., : 2 * size] + from_state[..., : 2 * size]
        r, z = torch.sigmoid(both).chunk(2, -1)
        forgotten = torch.sigmoid(-both[..., size:])
        q = from_state[..., 2 * size :]
        n = torch.tanh(from_input[..., 2 * size :] + r * q)
        new_input = forgotten * (1 - n * n)
        return cls(
            reset=new_input * q * (r * (1 - r)),
            update=(before - n) * (z * forgotten),
            new=new_input * r,
            new_input=new_input,
            forgotten=forgotten,
        )

    def jacobians(self, recurrent: Tensor) -> StepJacobians:
        coefficient = torch.stack([self.reset, self.update, self.new, -self.forgotten], -1)
        return StepJacobians(coefficient, _with_identity(recurrent, gates=3), kept=0)

    def gate_gradients(self, reached: Tensor) -> GateGradients:
        gates = [reached * self.reset, reached * self.update]
        return GateGradients(
            torch.cat([*gates, reached * self.new_input], -1),
            torch.cat([*gates, reached * self.new], -1),
        )


class LstmSteps(NamedTuple):
    """The slopes of an LSTM's steps, [steps, batch, size] each."""

    through_cell: Tensor  # [steps, batch, 3, size]: of the gates that the cell's gradient meets
    output: Tensor
    to_cell: Tensor  # from the output's gradient to the cell's
    forgotten: Tensor  # 1 - f

    @classmethod
    def of(
        cls, inputs: Tensor, before: Tensor, cells: Tensor, past: Tensor, weights: GatedWeights
    ) -> LstmSteps:
        """`past` are the cell states before each step."""
        sums = _lstm_sums(inputs, before, weights)
        i, f, g, o = _lstm_gates(sums)
        forgotten = torch.sigmoid(-sums[..., before.shape[-1] : 2 * before.shape[-1]])
        squashed = torch.tanh(cells)
        through = (g * i * (1 - i), past * f * forgotten, i * (1 - g * g))
        return cls(
            through_cell=torch.stack(through, -2),
            output=squashed * o * (1 - o),
            to_cell=o * (1 - squashed * squashed),
            forgotten=forgotten,
        )

    def jacobians(self, recurrent: Tensor) -> StepJacobians:
        size = recurrent.shape[-1]
        zero = torch.zeros_like(self.output)
        of_cell = torch.stack([*self.through_cell.unbind(-2), zero, -self.forgotten], -1)
        of_output = of_cell * self.to_cell.unsqueeze(-1)
        of_output[..., 3] = self.output
        of_output[..., 4] += self.to_cell
        half = _with_identity(recurrent, gates=4)
        basis = half.new_zeros(2 * size, 5, 2 * size)
        basis[:size, :4, :size] = basis[size:, :4, :size] = half[:, :4]
        basis[:size, 4, size:] = basis[size:, 4, size:] = half[:, 4]
        return StepJacobians(torch.cat([of_output, of_cell], -2), basis, kept=size)

    def gate_gradients(self, reached: Tensor) -> GateGradients:
        of_output, of_cell = reached.chunk(2, -1)
        of_cell = of_cell + of_output * self.to_cell
        through = of_cell.unsqueeze(-2) * self.through_cell
        gates = torch.cat([through.flatten(-2), of_output * self.output], -1)
        return GateGradients(gates, gates)


def _lstm_sums(inputs: Tensor, before: Tensor, weights: GatedWeights) -> Tensor:
    sums = torch.nn.functional.linear(inputs, weights.input, weights.bias_input)
    return sums + torch.nn.functional.linear(before, weights.recurrent, weights.bias_recurrent)


def _lstm_gates(sums: Tensor) -> tuple[Tensor, ...]:
    """Input, forget, cell and output gates of all steps."""
    i, f, g, o = sums.chunk(4, -1)
    return torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)


def lstm_cells(inputs: Tensor, before: Tensor, first: Tensor, weights: GatedWeights) -> Tensor:
    """All cell states, which torch does not give: they are a linear recurrence of the gates."""
    i, f, g, _ = _lstm_gates(_lstm_sums(inputs, before, weights))
    added = i * g
    added[0] += f[0] * first
    return scan_pairs(f.contiguous(), added)


def states_before(initial: Tensor, states: Tensor) -> Tensor:
    return torch.cat([initial.unsqueeze(0), states[:-1]])


def _with_identity(recurrent: Tensor, gates: int) -> Tensor:
    """[size, gates + 1, size]: for each row, the gates' weights and a row of the identity."""
    by_gate = recurrent.unflatten(0, (gates, -1)).transpose(0, 1)
    identity = torch.eye(recurrent.shape[-1], dtype=recurrent.dtype, device=recurrent.device)
    return torch.cat([by_gate, identity.unsqueeze(1)], 1)


# Backward through gated cells as a scan: steps whose Jacobians are mixtures of fixed rows.
#
# A step of a GRU or an LSTM sends the gradient of its state, a row r, to the state before. Row i of
# its Jacobian is a mixture of a few rows that all steps share, the weights' rows and a row of the
# identity, by coefficients of this step and sequence alone:
#
#     D[i] = sum over k of coefficient[i, k] * basis[i, k]          r  <-  (r + g) @ (K + D)
#
# K is the identity for what a step keeps, nothing elsewhere. What a gate forgets is in D: a float
# holds 10^-6 of it exactly, but not that a gate keeps 1 - 10^-6, and a long memory is a product of
# thousands of those.
#
# So a Jacobian is one small product, made for one step of all chunks at a time and dropped after
# it. Chunks are folded, carried and replayed as affine_maps.py does it for plain RNNs. The offset
# of a chunk's map is one more row of its matrix: a step of the fold is two products and two sums.

LARGEST_BY_KERNELS = 64  # numbers of a state: its matrix and all rows mixed are kept in registers
_RESCALE_EVERY = 4  # products
_MAPS_BYTES = 1 << 29  # that the maps of all chunks may take


class StepJacobians(NamedTuple):
    """The Jacobians of every step and sequence, as mixtures of fixed rows."""

    coefficient: Tensor  # [steps, batch, size, mixed]
    basis: Tensor  # [size, mixed, size]
    kept: int  # the first column of the state that is kept, and all behind it


@torch.no_grad()
def backward_rows(
    gradient: Tensor, jacobians: StepJacobians, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return what reaches every step's state, its own gradient included, and the first state."""
    steps, batch, size = gradient.shape
    if kernels_fit(gradient, LARGEST_BY_KERNELS):
        from stepscope.fix.scan.recurrence_kernels import backward_rows as by_kernels

        coefficient, basis, kept = jacobians
        return by_kernels(
            gradient.contiguous(), coefficient.contiguous(), basis.contiguous(), kept, chunk
        )
    chunk = chunk or usual_chunk(gradient)
    with exact_products(gradient.device):
        if chunk >= steps:
            return _one_after_the_other(gradient, jacobians)
        gradients, coefficients = (
            _by_place(values, chunk) for values in (gradient, jacobians.coefficient)
        )
        by_place = jacobians._replace(coefficient=coefficients)
        reached = _replay(gradients, by_place, carries(_fold(gradients, by_place)))
        reached = reached.transpose(0, 1).reshape(-1, batch, size)[-steps:]
        return reached, _back(reached[0], jacobians, place=0)


def usual_chunk(gradient: Tensor) -> int:
    """A plain loop on a CPU, where nothing runs at the same time. On a GPU a step of the fold takes
    as long for few chunks as for many, until they fill it: chunks are short, within memory."""
    steps, batch, size = map(int, gradient.shape)
    if gradient.device.type == "cpu":
        return steps
    chunk = 1 << max(3, (steps.bit_length() - 1) // 2)
    while 4 * -(-steps // chunk) * batch * size * size > _MAPS_BYTES and chunk < steps:
        chunk *= 2
    return chunk


def _by_place(values: Tensor, chunk: int) -> Tensor:
    """[chunk, groups, ...]: one place of all chunks is one piece of memory. Steps of zeros in front
    fill the first chunk: the gradient has left before it reaches them."""
    missing = -len(values) % chunk
    if missing:
        values = torch.cat([values.new_zeros(missing, *values.shape[1:]), values])
    return values.unflatten(0, (-1, chunk)).transpose(0, 1).contiguous()


def _one_after_the_other(gradient: Tensor, jacobians: StepJacobians) -> tuple[Tensor, Tensor]:
    row, reached = torch.zeros_like(gradient[0]), torch.empty_like(gradient)
    kept, flat = jacobians.kept, jacobians.basis.flatten(0, 1)
    mixed = torch.empty_like(jacobians.coefficient[0])
    places = (reversed(values.unbind()) for values in (gradient, jacobians.coefficient, reached))
    for own, coefficient, arrived in zip(*places, strict=True):
        torch.add(row, own, out=arrived)
        torch.mul(arrived.unsqueeze(-1), coefficient, out=mixed)
        torch.mm(mixed.flatten(1), flat, out=row)
        row[:, kept:] += arrived[:, kept:]
    return reached, row


def _back(arrived: Tensor, jacobians: StepJacobians, place: int) -> Tensor:
    """Rows through the steps of one place."""
    mixed = arrived.unsqueeze(-1) * jacobians.coefficient[place]
    row = mixed.flatten(-2) @ jacobians.basis.flatten(0, 1)
    row[..., jacobians.kept :] += arrived[..., jacobians.kept :]
    return row


def _fold(gradients: Tensor, jacobians: StepJacobians) -> AffineMaps:
    chunk, groups, batch, size = gradients.shape
    own, basis, kept = gradients.flatten(1, 2), jacobians.basis, jacobians.kept
    mixtures = jacobians.coefficient.flatten(1, 2).transpose(1, 2)  # [chunk, size, sequences, ...]
    rows = torch.eye(size + 1, size, dtype=basis.dtype, device=basis.device)
    rows = rows.repeat(groups * batch, 1, 1)
    exponent = gradients.new_zeros(groups * batch, size)
    for place in reversed(range(chunk)):
        rows[:, -1] += own[place]
        changed = torch.bmm(mixtures[place], basis).transpose(0, 1)
        before, rows = rows, torch.bmm(rows, changed)
        rows[..., kept:] += before[..., kept:]
        if place % _RESCALE_EVERY == 0:
            rows[:, :-1], exponent = rescaled(rows[:, :-1], exponent)
    maps = AffineMaps(rows[:, :-1], exponent, rows[:, -1])
    return AffineMaps(*(part.unflatten(0, (groups, batch)) for part in maps))


def _replay(gradients: Tensor, jacobians: StepJacobians, entering: Tensor) -> Tensor:
    row, reached = entering, torch.empty_like(gradients)
    for place in reversed(range(len(gradients))):
        torch.add(row, gradients[place], out=reached[place])
        row = _back(reached[place], jacobians, place)
    return reached


# Products of float32 without TF32, whatever the training has allowed.


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """TF32 loses 10^-3 of a product, and a chain multiplies thousands of them.

    Torch has an older and a newer way to allow TF32, and raises where it is asked by one after the
    other was used: what the training used is used here too.
    """
    products: Any = torch.backends.cuda.matmul
    if device.type != "cuda":
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        newer, products.fp32_precision = products.fp32_precision, "ieee"
        try:
            yield
        finally:
            products.fp32_precision = newer
        return
    if before == "highest":
        yield
        return
    products.allow_tf32 = False
    try:
        yield
    finally:
        products.allow_tf32 = True
        if before == "medium":
            torch.set_float32_matmul_precision(before)


# One layer of a GRU or an LSTM whose backward pass is a scan: a torch operator of its own.
#
# `gated_layer` computes the states as torch does (cuDNN on a GPU) and keeps them alone, and an
# LSTM's cell states. Its gradient is `gated_layer_backward`. Both are custom operators with shapes
# for torch.compile; a second derivative is refused.

_PIECE_ROWS = 2048


_LAYER = (
    "Tensor inputs, Tensor initial, Tensor weight_input, Tensor weight, Tensor? bias_input, "
    "Tensor? bias, str cell"
)


@torch.library.custom_op(
    "stepscope::gated_layer", mutates_args=(), schema=f"({_LAYER}) -> (Tensor, Tensor)"
)
def gated_layer(inputs: Tensor, initial: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """All states and, of an LSTM, all cell states (else empty), [steps, batch, size].

    `initial` is [batch, size]; of an LSTM [batch, 2 x size], the cell's behind the output's.
    """
    *layer, cell = given
    weights = GatedWeights(*layer)
    with torch.no_grad():
        states, last_cell = _states(inputs, initial, weights, cell)
        if last_cell is None:
            return states, states.new_empty(0)
        first, first_cell = initial.split(weights.recurrent.shape[-1], -1)
        with exact_products(inputs.device):
            before = wide(states_before(first, states))
            cells = lstm_cells(wide(inputs), before, wide(first_cell), _wide_weights(weights))
            cells = cells.to(states.dtype)
        cells[-1] = last_cell
    return states, cells


@gated_layer.register_fake
def _(inputs: Tensor, initial: Tensor, weight_input: Tensor, weight: Tensor, *rest: Any) -> Any:
    shape = (inputs.shape[0], inputs.shape[1], weight.shape[-1])
    return inputs.new_empty(shape), inputs.new_empty(shape if rest[-1] == "lstm" else 0)


def _states(
    inputs: Tensor, initial: Tensor, weights: GatedWeights, cell: str
) -> tuple[Tensor, Tensor | None]:
    """Compute states by torch, in as many calls as cuDNN needs, and an LSTM's last cell."""
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


@torch.library.custom_op(
    "stepscope::gated_layer_backward",
    mutates_args=(),
    schema=(
        f"(Tensor gradient, Tensor? gradient_of_cells, Tensor states, Tensor cells, {_LAYER}, "
        "bool wants_inputs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def gated_layer_backward(*given: Any) -> tuple[Tensor, ...]:
    """Gradients of inputs (empty if not wanted), initial state, both weights and both biases."""
    gradient, of_cells, states, cells, inputs, initial, *layer, cell, wants_inputs = given
    weights = _wide_weights(GatedWeights(*layer))
    features = wide(inputs)
    with torch.no_grad(), exact_products(inputs.device):
        before, steps = _steps(features, wide(states), wide(cells), wide(initial), weights, cell)
        if cell == "gru":
            own = wide(gradient).contiguous()
        else:
            of_cells = torch.zeros_like(gradient) if of_cells is None else of_cells
            own = torch.cat([wide(gradient), wide(of_cells)], -1)
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
    return tuple(one.to(states.dtype) for one in found)


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


def _wide_weights(weights: GatedWeights) -> GatedWeights:
    return GatedWeights(*(None if one is None else wide(one) for one in weights))


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
