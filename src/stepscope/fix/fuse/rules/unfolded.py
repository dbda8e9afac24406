"""A convolution as one matrix product a model: every output's inputs side by side in a row.

The rows are as many times as large as the input as the kernel has elements, so this pays for
small pictures with many channels, where grouped kernels are poor, and for the first layer, whose
few channels leave other kernels idle. Backward makes the rows again, or keeps them, which is faster
and takes memory.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import torch

from stepscope.fix.fuse.rules.filters import channels_last, precision_of_autocast
from stepscope.fix.fuse.rules.patches import KernelWindow, between
from stepscope.fix.fuse.rules.pointwise import multiply_rows
from stepscope.fix.fuse.rules.taps import each_dimension


def convolve_unfolded(
    last: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    keep_rows: bool = False,
) -> torch.Tensor:
    """[batch, *sizes, models, channels] -> [batch, models * outputs, *sizes], channels last in
    memory."""
    models, outputs, _, *kernel = weight.shape
    dimensions = len(kernel)
    window = KernelWindow(
        tuple(kernel), *(each_dimension(one, dimensions) for one in (stride, padding, dilation))
    )
    last = last.to(precision_of_autocast(last))
    filters = channels_last(weight, precision_of_autocast(weight))
    made = _Unfolded.apply(last, filters, window, keep_rows)
    if bias is not None:
        made = made + bias.to(made.dtype)
    whole: torch.Tensor = made.reshape(*made.shape[:-2], models * outputs).movedim(-1, 1)
    return whole


class _Unfolded(torch.autograd.Function):
    """[batch, *sizes, models, channels] and [models, outputs, *kernel, channels]."""

    @staticmethod
    def forward(
        context: Any,
        last: torch.Tensor,
        weight: torch.Tensor,
        window: KernelWindow,
        keep_rows: bool,
    ) -> torch.Tensor:
        rows = window.rows(last)
        context.save_for_backward(rows if keep_rows else last, weight)
        context.window, context.shape, context.has_rows = window, last.shape, keep_rows
        matrices = window.shape_of(weight).matrices(weight)
        return _multiplied(rows, matrices.transpose(1, 2), window, last.shape)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        seen, weight = context.saved_tensors
        window, gradient = context.window, gradients[0].contiguous()
        of_input = of_weight = None
        if context.needs_input_grad[0]:
            of_input = _input_gradient(gradient, context.shape, weight, window)
        if context.needs_input_grad[1]:
            rows = seen if context.has_rows else window.rows(seen)
            of_weight = _weight_gradient(gradient, rows, weight, window)
        return of_input, of_weight, None, None


def _multiplied(
    rows: torch.Tensor, matrices: torch.Tensor, window: KernelWindow, shape: torch.Size
) -> torch.Tensor:
    """`shape` is that of the pictures that the rows were made of."""
    made = multiply_rows(rows, matrices)
    return made.reshape(shape[0], *window.outputs(shape[1:-2]), *made.shape[1:])


def _weight_gradient(
    gradient: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, window: KernelWindow
) -> torch.Tensor:
    flat = gradient.reshape(-1, *gradient.shape[-2:])
    made = torch.bmm(flat.permute(1, 2, 0), rows.transpose(0, 1))
    return window.shape_of(weight).filters(made)


def _input_gradient(
    gradient: torch.Tensor, shape: torch.Size, weight: torch.Tensor, window: KernelWindow
) -> torch.Tensor:
    if all(step == 1 for step in window.stride):
        back = window.turned()
        matrices = back.shape_of(gradient).turned_matrices(weight)
        return _multiplied(back.rows(gradient), matrices, back, gradient.shape)
    return _added_by_tap(gradient, shape, weight, window)


def _added_by_tap(
    gradient: torch.Tensor, shape: torch.Size, weight: torch.Tensor, window: KernelWindow
) -> torch.Tensor:
    """Every kernel element's share, added where it was read."""
    sizes = shape[1:-2]
    wide = [size + 2 * border for size, border in zip(sizes, window.padding, strict=True)]
    models, channels = shape[-2:]
    total = gradient.new_zeros(shape[0], *wide, models, channels)
    flat = gradient.reshape(-1, *gradient.shape[-2:])
    shares = multiply_rows(flat, weight.flatten(2))
    shares = shares.reshape(*gradient.shape[:-1], prod(window.kernel), channels)
    for number, tap in enumerate(product(*map(range, window.kernel))):
        total[_read_by(tap, window, gradient.shape[1:-2])] += shares[..., number, :]
    return total[(slice(None), *between(sizes, window.padding))].contiguous()


def _read_by(tap: tuple[int, ...], window: KernelWindow, outputs: Any) -> tuple[slice, ...]:
    """Where a kernel element reads, for all outputs."""
    parts = []
    for at, step, gap, count in zip(tap, window.stride, window.dilation, outputs, strict=True):
        parts.append(slice(at * gap, at * gap + (count - 1) * step + 1, step))
    return (slice(None), *parts)
