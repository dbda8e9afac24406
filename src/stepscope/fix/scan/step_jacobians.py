"""Backward through gated cells as a scan: steps whose Jacobians are mixtures of fixed rows.

A step of a GRU or an LSTM sends the gradient of its state, a row r, to the state before. Row i of
its Jacobian is a mixture of a few rows that all steps share, the weights' rows and a row of the
identity, by coefficients of this step and sequence alone:

    D[i] = sum over k of coefficient[i, k] * basis[i, k]          r  <-  (r + g) @ (K + D)

K is the identity for what a step keeps, nothing elsewhere. What a gate forgets is in D: a float
holds 10^-6 of it exactly, but not that a gate keeps 1 - 10^-6, and a long memory is a product of
thousands of those.

So a Jacobian is one small product, made for one step of all chunks at a time and dropped after it.
Chunks are folded, carried and replayed as affine_maps.py does it for plain RNNs. The offset of a
chunk's map is one more row of its matrix: a step of the fold is two products and two sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from stepscope.fix.scan.affine_maps import AffineMaps, carries, rescaled
from stepscope.fix.scan.exact_products import exact_products
from stepscope.fix.scan.rnn_layer import has_triton

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_BY_KERNELS = 64  # numbers of a state: its matrix and all rows mixed are kept in registers
_RESCALE_EVERY = 4  # products
_MAPS_BYTES = 1 << 29  # that the maps of all chunks may take


class StepJacobians(NamedTuple):
    """Of every step and sequence."""

    coefficient: Tensor  # [steps, batch, size, mixed]
    basis: Tensor  # [size, mixed, size]
    kept: int  # the first column of the state that is kept, and all behind it


@torch.no_grad()
def backward_rows(
    gradient: Tensor, jacobians: StepJacobians, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """What reaches every step's state, its own gradient included, and the initial state."""
    steps, batch, size = gradient.shape
    if _kernels_fit(gradient):
        from stepscope.fix.scan.gated_kernels import backward_rows as by_kernels

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


def _kernels_fit(gradient: Tensor) -> bool:
    return (
        gradient.is_cuda
        and gradient.dtype == torch.float32
        and gradient.shape[-1] <= LARGEST_BY_KERNELS
        and has_triton()
    )


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
