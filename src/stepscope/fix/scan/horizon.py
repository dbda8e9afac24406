"""How far back the gradient of a recurrence reaches: look at this before anything is made faster.

Where only the last few dozen of thousands of steps carry a gradient that a float can tell from
zero, truncated backpropagation gives the same training for less than any scan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from stepscope.fix.scan.rnn_layer import backward_states
from stepscope.fix.scan.scan_rnn import ScanRNN

if TYPE_CHECKING:
    from torch import Tensor, nn

SHARE = 1e-7  # of the largest gradient: what a float of 32 bits can still add to it
_PROBES = 4


@dataclass(frozen=True, slots=True)
class GradientHorizon:
    """Steps back from the one whose loss it is, of so many that there were."""

    steps: int
    of: int
    share: float

    @property
    def truncation_pays(self) -> bool:
        """Less than half of the steps matter."""
        return 2 * self.steps < self.of

    def __str__(self) -> str:
        what = f"{self.steps} of {self.of} steps carry more than {self.share:g} of the gradient"
        if not self.truncation_pays:
            return what
        return f"{what}: truncate backpropagation to {2 * self.steps} steps"


def gradient_horizon(
    rnn: nn.RNN | Any, inputs: Tensor, hx: Tensor | None = None, share: float = SHARE
) -> GradientHorizon:
    """Measure how many steps back a gradient reaches that enters a plain RNN at its last step.

    `inputs` is a batch as training has it. Several random gradients are sent back; what counts is
    the largest of them, the batch and the layers. Where the gradient grows out of the range of a
    float on its way, every step counts.
    """
    if not 0 < share < 1:
        raise ValueError(f"share is between 0 and 1, not {share:g}")
    if not isinstance(inputs, torch.Tensor):
        raise ValueError(
            f"inputs are a padded batch, a tensor, not a {type(inputs).__name__}. A sequence "
            "of full length shows how far its gradient reaches"
        )
    with torch.no_grad():
        states = _states_by_layer(rnn, inputs, hx)
    if not all(bool(layer.isfinite().all()) for layer, _ in states):
        raise ValueError("not all states are finite. Check the inputs and the forward pass")
    reach = max(
        _reach(layer, weight, rnn.nonlinearity == "tanh", share) for layer, weight in states
    )
    return GradientHorizon(reach, len(states[0][0]), share)


def _reach(states: Tensor, weight: Tensor, tanh: bool, share: float) -> int:
    gradient = torch.zeros_like(states)
    largest = torch.zeros(len(states), device=states.device, dtype=states.dtype)
    generator = torch.Generator(states.device).manual_seed(0)
    for _ in range(_PROBES):
        gradient[-1].normal_(generator=generator)
        reached, _ = backward_states(gradient, states, weight, tanh=tanh)
        largest = torch.maximum(largest, reached.flatten(1).abs().amax(1))
    if not largest.isfinite().all():
        return len(states)
    counts = (largest > share * largest.max()).nonzero()
    return len(states) - int(counts[0]) if len(counts) else 0


def _states_by_layer(
    rnn: nn.RNN | Any, inputs: Tensor, hx: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """Every layer's states in the order of its own steps, with its recurrent weight."""
    model = rnn if isinstance(rnn, ScanRNN) else ScanRNN.of(rnn)
    return model.states_by_layer(*model.batched(inputs, hx))
