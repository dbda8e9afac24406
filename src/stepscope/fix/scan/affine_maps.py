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

from typing import NamedTuple

import torch
from torch import Tensor

from stepscope.records.scan_costs import GROUP, cpu_chunk

_RESCALE_EVERY = 8  # products: weights with a norm up to 10^4 stay in range between two


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
