"""`ScanGRU` and `ScanLSTM`: torch's modules with a backward pass of logarithmic depth.

State dicts are interchangeable. Products in backward are those of float32, without TF32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stepscope.fix.refusal import RefusedError
from stepscope.fix.scan.gated_layer import gated_layer
from stepscope.fix.scan.scan_stack import ScanStack

if TYPE_CHECKING:
    from torch import Tensor


class ScanGRU(ScanStack):
    """Takes and gives what nn.GRU does."""

    replaces = nn.GRU

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self._take(nn.GRU(*arguments, **options))

    def _one_layer(
        self, steps: Tensor, initial: Tensor, weights: list[Tensor | None]
    ) -> tuple[Tensor, ...]:
        states, _ = gated_layer(steps, initial, *weights, "gru")
        return (states,)


class ScanLSTM(ScanStack):
    """Takes and gives what nn.LSTM does, but for proj_size."""

    replaces = nn.LSTM
    parts = 2

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self._take(nn.LSTM(*arguments, **options))

    def _take(self, rnn: nn.RNNBase) -> None:
        if rnn.proj_size:
            raise RefusedError(
                f"there is no scan for an nn.LSTM with proj_size={rnn.proj_size}. Leave it "
                "unchanged, or project its outputs with an nn.Linear"
            )
        super()._take(rnn)

    def _one_layer(
        self, steps: Tensor, initial: Tensor, weights: list[Tensor | None]
    ) -> tuple[Tensor, ...]:
        states, cells = gated_layer(steps, initial, *weights, "lstm")
        return states, cells

    def _joined(self, hx: Any) -> Tensor | None:
        if hx is None:
            return None
        if not isinstance(hx, (tuple, list)) or len(hx) != 2 or hx[0].shape != hx[1].shape:
            raise ValueError("the initial state of an LSTM is a pair, (h_0, c_0), of one shape")
        return torch.cat(tuple(hx), -1)

    def _parted(self, last: Tensor) -> Any:
        output, cell = last.split(self.hidden_size, -1)
        return output.contiguous(), cell.contiguous()
