"""`ScanRNN`: nn.RNN with a backward pass of logarithmic depth. State dicts are interchangeable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stepscope.fix.refusal import RefusedError
from stepscope.fix.scan.rnn_layer import PRECISIONS, scanned_layer
from stepscope.fix.scan.scan_stack import ScanStack

if TYPE_CHECKING:
    from torch import Tensor


class ScanRNN(ScanStack):
    """Takes and gives what nn.RNN does.

    `precision` is that of a GPU's products in backward: "fp32", "tf32x3" (about as exact, on tensor
    cores), "tf32" or "bf16".
    """

    replaces = nn.RNN

    def __init__(self, *arguments: Any, precision: str = "tf32x3", **options: Any) -> None:
        super().__init__()
        self._take(nn.RNN(*arguments, **options), precision)

    def _take(self, rnn: Any, precision: str = "tf32x3") -> None:
        if precision not in PRECISIONS:
            raise RefusedError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}")
        self.precision, self.nonlinearity = precision, rnn.nonlinearity
        super()._take(rnn)

    def _one_layer(
        self, steps: Tensor, initial: Tensor, weights: list[Tensor | None]
    ) -> tuple[Tensor, ...]:
        tanh = self.nonlinearity == "tanh"
        return (scanned_layer(steps, initial, *weights, tanh, self.precision),)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, precision={self.precision!r}"

    def _usual(self) -> dict[str, Any]:
        return super()._usual() | {"nonlinearity": "tanh"}

    def states_by_layer(
        self, inputs: Tensor, hx: Tensor | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Of a batch: each layer's and direction's states in the order of its own steps, and its
        recurrent weight. Dropout between layers is left out."""
        steps = inputs.transpose(0, 1) if self.batch_first else inputs
        initial, directions = self._initial(steps, hx), 2 if self.bidirectional else 1
        found = []
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(directions):
                first, back = initial[layer * directions + direction], direction == 1
                states, _ = self._one_way(steps, first, layer, back, None)
                outputs.append(states)
                weight = self._weights(f"_l{layer}{'_reverse' if back else ''}")[1]
                found.append((_turned(states, back), weight))
            steps = torch.cat(outputs, -1)
        return found


def _turned(values: Tensor, back: bool) -> Tensor:
    return values.flip(0).contiguous() if back else values
