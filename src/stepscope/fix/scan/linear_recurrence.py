"""h[t] = a[t] * h[t-1] + b[t], element by element: state-space models, gated linear layers.

Forward is a scan of the pairs (a, b), and so is backward, from the other end. Numbers may be
complex (S4D, LRU). On a GPU each element's chunks are computed by kernels; elsewhere neighbours
are combined at doubling distances inside a chunk (Hillis and Steele), and chunks likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stepscope.fix.scan.rnn_layer import kernels_fit, refuse_second_derivative

if TYPE_CHECKING:
    Times = Callable[[Tensor, Tensor], Tensor]

_CHUNK = 64


def linear_scan(decay: Tensor, inputs: Tensor, initial: Tensor | None = None) -> Tensor:
    """Return all states of a linear recurrence, shaped like `inputs`: [steps, ...].

    `decay` may lack steps or other dimensions if it is the same for all of them.
    """
    if inputs.dim() < 1 or not len(inputs):
        raise ValueError(
            f"inputs are [steps, ...] with at least one step, not {list(inputs.shape)}"
        )
    first = torch.zeros_like(inputs[0]) if initial is None else initial
    for name, values, target in (("decay", decay, inputs), ("initial", first, inputs[0])):
        places = zip(reversed(values.shape), reversed(target.shape), strict=False)
        if values.dim() > target.dim() or any(mine not in (1, its) for mine, its in places):
            raise ValueError(
                f"{name} is {list(values.shape)}: it does not broadcast to {list(target.shape)}"
            )
    kind = torch.promote_types(torch.promote_types(decay.dtype, inputs.dtype), first.dtype)
    states: Tensor = linear_states(
        decay.to(kind).expand_as(inputs).contiguous(),
        inputs.to(kind).contiguous(),
        first.to(kind).expand_as(inputs[0]).contiguous(),
    )
    return states


@torch.library.custom_op("stepscope::linear_states", mutates_args=())
def linear_states(decay: Tensor, inputs: Tensor, initial: Tensor) -> Tensor:
    first = inputs[:1] + decay[:1] * initial
    return scan_pairs(decay, torch.cat([first, inputs[1:]]))


@linear_states.register_fake
def _(decay: Tensor, inputs: Tensor, initial: Tensor) -> Tensor:
    return torch.empty_like(inputs)


@torch.library.custom_op("stepscope::linear_states_backward", mutates_args=())
def linear_states_backward(
    gradient: Tensor, states: Tensor, decay: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of decay, inputs and initial state: the states' own is a scan from the end."""
    turned = decay.conj().flip(0)
    later = torch.cat([torch.zeros_like(turned[:1]), turned[:-1]])
    reached = scan_pairs(later, gradient.flip(0)).flip(0)
    before = torch.cat([initial.unsqueeze(0), states[:-1]])
    return reached * before.conj(), reached, reached[0] * decay[0].conj()


@linear_states_backward.register_fake
def _(
    gradient: Tensor, states: Tensor, decay: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(decay), torch.empty_like(gradient), torch.empty_like(initial)


def scan_pairs(decay: Tensor, inputs: Tensor) -> Tensor:
    """From a state of zero. Elements on a GPU go to the kernels."""
    if kernels_fit(inputs, or_complex=True):
        from stepscope.fix.scan.recurrence_kernels import scan_pairs as by_kernels

        return by_kernels(decay, inputs)
    states = _by_chunks(decay, inputs)
    # Products of decays may overflow where no state does, because it is zero there.
    return states if states.isfinite().all() else _by_chunks(decay, inputs, _zero_wins)


def _zero_wins(decay: Tensor, state: Tensor) -> Tensor:
    product = decay * state
    return torch.where((decay == 0) | (state == 0), torch.zeros_like(product), product)


def _by_chunks(decay: Tensor, inputs: Tensor, times: Times = torch.mul) -> Tensor:
    steps = len(inputs)
    if steps <= _CHUNK:
        return _by_doubling(decay, inputs, times)[1]
    filling = inputs.new_zeros(-steps % _CHUNK, *inputs.shape[1:])
    factors, terms = (
        torch.cat([values, filling]).unflatten(0, (-1, _CHUNK)).transpose(0, 1)
        for values in (decay, inputs)
    )
    decays, states = (part.transpose(0, 1) for part in _by_doubling(factors, terms, times))
    ends = _by_chunks(decays[:, -1], states[:, -1], times)
    entering = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]]).unsqueeze(1)
    return (states + times(decays, entering)).flatten(0, 1)[:steps]


def _by_doubling(decay: Tensor, inputs: Tensor, times: Times) -> tuple[Tensor, Tensor]:
    """Products of decays and states, over dimension 0."""
    reach = 1
    while reach < len(inputs):
        states = inputs[reach:] + times(decay[reach:], inputs[:-reach])
        decays = times(decay[reach:], decay[:-reach])
        inputs = torch.cat([inputs[:reach], states])
        decay = torch.cat([decay[:reach], decays])
        reach *= 2
    return decay, inputs


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    decay, _, initial = inputs
    ctx.save_for_backward(output, decay, initial)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    states, decay, initial = ctx.saved_tensors
    of_all: tuple[Tensor, Tensor, Tensor] = linear_states_backward(
        gradient.contiguous(), states, decay, initial
    )
    return of_all


linear_states.register_autograd(_backward, setup_context=_keep)
linear_states_backward.register_autograd(refuse_second_derivative)
