"""What a GRU's and an LSTM's steps do to a gradient, for all steps at once.

Gates are computed again from inputs and states: that is no chain. A cell gives the Jacobians of its
steps (step_jacobians.py) and, from the gradients that reached the states, those of its gates. With
a the gradient of a step's output, W the recurrent weights and ' the slope of an activation:

    GRU    h = (1 - z) n + z h_before,   n = tanh(x_n + r q),   q = W_n h_before + b_n
           a  ->  a z  +  (a (1-z) n' q r') W_r  +  (a (h_before - n) z') W_z  +  (a (1-z) n' r) W_n

    LSTM   h = o tanh(c),   c = f c_before + i g;   b is the gradient of c, s = o tanh'(c)
           b  ->  (b + a s) f
           a  ->  (b + a s) (g i' W_i + c_before f' W_f + i g' W_g)  +  a tanh(c) o' W_o
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from stepscope.fix.scan.linear_recurrence import scan_pairs
from stepscope.fix.scan.step_jacobians import StepJacobians

if TYPE_CHECKING:
    from torch import Tensor


class GatedWeights(NamedTuple):
    """As torch has them: the gates' rows one after the other."""

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
        cls,
        inputs: Tensor,
        before: Tensor,
        cells: Tensor,
        cells_before: Tensor,
        weights: GatedWeights,
    ) -> LstmSteps:
        sums = _lstm_sums(inputs, before, weights)
        i, f, g, o = _lstm_gates(sums)
        forgotten = torch.sigmoid(-sums[..., before.shape[-1] : 2 * before.shape[-1]])
        squashed = torch.tanh(cells)
        through = (g * i * (1 - i), cells_before * f * forgotten, i * (1 - g * g))
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
