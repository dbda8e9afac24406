"""Convolutions with kernels of one element are matrix products: one for each model, in one call."""

from __future__ import annotations

from typing import Any

import torch

from stepscope.fix.fuse.stacked import is_ordinary


def product(front: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[models, batch, channels, *rest] -> the same with `weight`'s outputs.

    The result lies in memory as [models, channels, batch, *rest], so that a chain of such layers,
    with norms between them, moves nothing.
    """
    wide = front.transpose(1, 2)
    models, channels, batch, *rest = wide.shape
    filters = weight.reshape(models, -1, channels)
    columns = wide.reshape(models, channels, -1)
    if bias is None:
        outputs = torch.bmm(filters, columns)
    else:
        outputs = torch.baddbmm(bias.unsqueeze(2), filters, columns)
    return outputs.reshape(models, -1, batch, *rest).transpose(1, 2)


def shared_product(
    pictures: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The same for [batch, channels, *rest] that all models share: one product for all filters."""
    wide = pictures.transpose(0, 1)
    channels, batch, *rest = wide.shape
    models = weight.shape[0]
    filters = weight.reshape(-1, channels)
    columns = wide.reshape(channels, -1)
    if bias is None:
        outputs = torch.mm(filters, columns)
    else:
        outputs = torch.addmm(bias.reshape(-1, 1), filters, columns)
    return outputs.reshape(models, -1, batch, *rest).transpose(1, 2)


def product_in_channels(
    pictures: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """[batch, models * channels, *rest], channels last in memory -> the same; nothing is moved."""
    models, outputs = weight.shape[:2]
    last = pictures.movedim(1, -1)
    batch_and_rest = last.shape[:-1]
    rows = last.reshape(-1, models, last.shape[-1] // models)
    filters = weight.reshape(models, outputs, -1)
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        rows, filters = rows.to(dtype), filters.to(dtype)
    made = _RowsTimesFilters.apply(rows, filters)
    if bias is not None:
        made = made + bias.to(made.dtype)
    whole: torch.Tensor = made.reshape(*batch_and_rest, models * outputs)
    return whole.movedim(-1, 1)


class _RowsTimesFilters(torch.autograd.Function):
    """[rows, models, inputs] times [models, outputs, inputs]: batched products read and write
    every second dimension in place, which torch's own would first bring to the front."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(rows, filters)
        return multiply_rows(rows, filters.transpose(1, 2))

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, filters = context.saved_tensors
        (gradient,) = gradients
        gradient = gradient.contiguous()
        of_filters = torch.bmm(gradient.permute(1, 2, 0), rows.transpose(0, 1))
        return multiply_rows(gradient, filters), of_filters


def multiply_rows(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """[rows, models, inputs] times [models, inputs, outputs] -> [rows, models, outputs]."""
    if not is_ordinary(rows):  # a compiler chooses the result's layout, and gives no place for it
        return torch.bmm(rows.transpose(0, 1), matrices).transpose(0, 1)
    result = rows.new_empty(*rows.shape[:2], matrices.shape[2])
    torch.bmm(rows.transpose(0, 1), matrices, out=result.transpose(0, 1))
    return result
