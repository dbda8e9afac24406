"""Backward through time as a scan of affine maps, in plain torch.

The gradient that arrives at step t from later ones is a row r. The step adds its own gradient g,
multiplies by the slope d of its activation and by the recurrent weights:

    r  <-  ((r + g) * d) @ W

That is affine in r, so the steps of a chunk are one affine map r -> r @ M + v, whatever comes from
the right. Chunks fold into maps at the same time; maps fold into maps of maps; at the top the
gradient enters from the right, and on the way down every chunk learns what enters it. Then all
chunks replay their steps at the same time. With a fixed number of members a group, the depth is
logarithmic in the number of steps.

Products of many Jacobians leave the range of a float long before the gradient does, so each row of
M is kept with a power of two of its own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from stepscope.records.scan_costs import GROUP, cpu_chunk

Times = Callable[[Tensor, Tensor], Tensor]

_RESCALE_EVERY = 8  # products: weights with a norm up to 10^4 stay in range between two


class SecondDerivativeError(NotImplementedError):
    """The gradient of a scan's gradient was asked for."""


def refuse_second_derivative(*_: Any) -> NoReturn:
    raise SecondDerivativeError(
        "the gradient of a scan's gradient is not implemented. Use torch's own modules where "
        "a second derivative is needed (create_graph=True, gradient penalties)"
    )


def wide(values: Tensor) -> Tensor:
    """16 bits hold neither products of many Jacobians nor their powers of two."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def kernels_fit(values: Tensor, largest: int | None = None, *, or_complex: bool = False) -> bool:
    """Whether Triton's kernels take them; `largest` is that of the last dimension."""
    return (
        values.is_cuda
        and (values.dtype == torch.float32 or (or_complex and values.dtype == torch.complex64))
        and (largest is None or values.shape[-1] <= largest)
        and _has_triton()
    )


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class AffineMaps(NamedTuple):
    """r -> (r * 2^exponent) @ matrix + offset, for every group and sequence of the batch."""

    matrix: Tensor  # [groups, batch, size, size]
    exponent: Tensor  # [groups, batch, size]: of each row of the matrix
    offset: Tensor  # [groups, batch, size]


@torch.no_grad()
def backward_states(
    gradient: Tensor, slope: Tensor, weight: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return what reaches the sums inside each step's activation, and the initial state.

    `gradient` is that of every step's own output, [steps, batch, size]; `slope` the derivative of
    its activation; `weight` the recurrent one, as nn.RNN has it.
    """
    steps, batch, size = gradient.shape
    chunk = chunk or usual_chunk(gradient)
    if chunk >= steps:
        return _one_after_the_other(gradient, slope, weight)
    whole = -(-steps // chunk) * chunk
    # Zeros in front are steps that change nothing: the gradient has left when it reaches them.
    padded = [_pad_front(values, whole - steps) for values in (gradient, slope)]
    gradients, slopes = (values.view(-1, chunk, batch, size) for values in padded)
    entering = carries(_fold_steps(gradients, slopes, weight))
    reached = _replay(gradients, slopes, weight, entering).view(whole, batch, size)
    reached = reached[whole - steps :]
    return reached, reached[0] @ weight


def usual_chunk(gradient: Tensor) -> int:
    """On a CPU by the model of its cost. Elsewhere a fold multiplies matrices where the replay
    multiplies rows, so few long chunks are less work and many short ones are done earlier: about
    as many chunks as steps in each."""
    steps, batch, size = map(int, gradient.shape)
    if gradient.device.type == "cpu":
        return cpu_chunk(steps, batch, size)
    return max(1, min(steps, 1 << (steps.bit_length() // 2)))


def _one_after_the_other(gradient: Tensor, slope: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Three calls a step and nothing kept: where no chunks run at the same time, the best there
    is. Autograd needs several times as many calls."""
    row, reached = torch.zeros_like(gradient[0]), torch.empty_like(gradient)
    parts = (reversed(values.unbind()) for values in (gradient, slope, reached))
    for own, its_slope, error in zip(*parts, strict=True):
        torch.add(row, own, out=error)
        error.mul_(its_slope)
        torch.mm(error, weight, out=row)
    return reached, row


def carries(maps: AffineMaps) -> Tensor:
    """The row that enters each group from the right; nothing enters the last."""
    groups, batch, size = maps.offset.shape
    if groups <= GROUP:
        return _spread(maps, torch.zeros_like(maps.offset[:1]), members=groups)
    whole = -(-groups // GROUP) * GROUP
    filled = _with_identities(maps, whole - groups)
    above = _fold_maps(AffineMaps(*(part.unflatten(0, (-1, GROUP)) for part in filled)))
    spread = _spread(filled, carries(above), members=GROUP)
    return spread.reshape(whole, batch, size)[whole - groups :]


def _pad_front(values: Tensor, count: int) -> Tensor:
    if not count:
        return values
    return torch.cat([values.new_zeros(count, *values.shape[1:]), values])


def _fold_steps(gradients: Tensor, slopes: Tensor, weight: Tensor) -> AffineMaps:
    groups, chunk, batch, size = gradients.shape
    matrix = torch.eye(size, dtype=weight.dtype, device=weight.device)
    matrix = matrix.expand(groups, batch, size, size)
    exponent = gradients.new_zeros(groups, batch, size)
    offset = gradients.new_zeros(groups, batch, size)
    for place in reversed(range(chunk)):
        slope = slopes[:, place]
        matrix = (matrix * slope.unsqueeze(-2)) @ weight
        offset = ((offset + gradients[:, place]) * slope) @ weight
        if place % _RESCALE_EVERY == 0:
            matrix, exponent = rescaled(matrix, exponent)
    return AffineMaps(matrix, exponent, offset)


def _fold_maps(members: AffineMaps) -> AffineMaps:
    """Members of a group stand in dimension 1; the last one comes first."""
    matrix, exponent, offset = (part[:, -1] for part in members)
    for place in reversed(range(members.offset.shape[1] - 1)):
        its_matrix, its_exponent, its_offset = (part[:, place] for part in members)
        largest = its_exponent.amax(-1, keepdim=True)
        columns = torch.exp2(its_exponent - largest).unsqueeze(-2)
        matrix, exponent = rescaled((matrix * columns) @ its_matrix, exponent + largest)
        offset = _through(offset, its_matrix, its_exponent) + its_offset
    return AffineMaps(matrix, exponent, offset)


def _spread(maps: AffineMaps, entering: Tensor, members: int) -> Tensor:
    """From what enters each group of `members` maps, what enters each map, in one list."""
    matrix, exponent, offset = (part.unflatten(0, (-1, members)) for part in maps)
    row, rows = entering, [entering]
    for place in reversed(range(1, members)):
        row = _through(row, matrix[:, place], exponent[:, place]) + offset[:, place]
        rows.append(row)
    return torch.stack(rows[::-1], dim=1).flatten(0, 1)


def _replay(gradients: Tensor, slopes: Tensor, weight: Tensor, entering: Tensor) -> Tensor:
    row, reached = entering, torch.empty_like(gradients)
    for place in reversed(range(gradients.shape[1])):
        reached[:, place] = (row + gradients[:, place]) * slopes[:, place]
        row = reached[:, place] @ weight
    return reached


def _through(row: Tensor, matrix: Tensor, exponent: Tensor) -> Tensor:
    """Powers of two in two halves: either may be in range where the whole is not."""
    half = torch.exp2(exponent / 2)
    scaled = torch.where(row == 0, row, row * half * half)
    return (scaled.unsqueeze(-2) @ matrix).squeeze(-2)


def rescaled(matrix: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Every row with its largest number between 1 and 2."""
    largest = matrix.abs().amax(-1)
    power = torch.where(largest > 0, largest.log2().floor(), torch.zeros_like(largest))
    return matrix * torch.exp2(-power).unsqueeze(-1), exponent + power


def _with_identities(maps: AffineMaps, count: int) -> AffineMaps:
    """Maps in front that change nothing, so that groups are whole."""
    _, batch, size = maps.offset.shape
    identity = torch.eye(size, dtype=maps.matrix.dtype, device=maps.matrix.device)
    return AffineMaps(
        torch.cat([identity.expand(count, batch, size, size), maps.matrix]),
        _pad_front(maps.exponent, count),
        _pad_front(maps.offset, count),
    )


# h[t] = a[t] * h[t-1] + b[t], element by element: state-space models, gated linear layers.
#
# Forward is a scan of the pairs (a, b), and so is backward, from the other end. Numbers may be
# complex (S4D, LRU). On a GPU each element's chunks are computed by kernels; elsewhere neighbours
# are combined at doubling distances inside a chunk (Hillis and Steele), and chunks likewise.

_LINEAR_CHUNK = 64


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
    if steps <= _LINEAR_CHUNK:
        return _by_doubling(decay, inputs, times)[1]
    filling = inputs.new_zeros(-steps % _LINEAR_CHUNK, *inputs.shape[1:])
    factors, terms = (
        torch.cat([values, filling]).unflatten(0, (-1, _LINEAR_CHUNK)).transpose(0, 1)
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


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    decay, _, initial = inputs
    ctx.save_for_backward(output, decay, initial)


def _linear_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    states, decay, initial = ctx.saved_tensors
    of_all: tuple[Tensor, Tensor, Tensor] = linear_states_backward(
        gradient.contiguous(), states, decay, initial
    )
    return of_all


linear_states.register_autograd(_linear_backward, setup_context=_keep_linear)
linear_states_backward.register_autograd(refuse_second_derivative)
