"""Filters in the precision and order that a convolution reads: one pass over memory each way.

A cast and a copy to another layout would be two passes, and as many for the gradient on its way
back, for every weight of every model in every step.
"""

from __future__ import annotations

from typing import Any

import torch

from stepscope.fix.fuse.proven_kernels import proven_kernels

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by a tensor's dimensions
_CAST = (torch.float32, torch.float16, torch.bfloat16)  # autocast leaves float64 as it is


def channels_last(weight: torch.Tensor, precision: torch.dtype | None = None) -> torch.Tensor:
    """[models, outputs, inputs, *kernel] -> [models, outputs, *kernel, inputs], without gaps."""
    arranged: torch.Tensor = _ChannelsLast.apply(weight, precision or weight.dtype)
    return arranged


def as_filters(arranged: torch.Tensor) -> torch.Tensor:
    """What `channels_last` gave, as one convolution of all models takes it; a view."""
    return arranged.flatten(0, 1).movedim(-1, 1)


def precision_of_autocast(tensor: torch.Tensor) -> torch.dtype:
    """In which autocast would compute with it."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.dtype in _CAST:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


class _ChannelsLast(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, weight: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
        context.precision = weight.dtype
        kernels = _kernels_for(weight, precision, weight.shape[3:])
        if kernels is not None:
            arranged: torch.Tensor = kernels.channels_last(weight, precision)
            return arranged
        turned = weight.movedim(2, -1)
        return torch.empty(turned.shape, dtype=precision, device=weight.device).copy_(turned)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradients[0]
        kernels = _kernels_for(gradient, context.precision, gradient.shape[2:-1])
        if kernels is not None:
            return kernels.channels_first(gradient, context.precision), None
        turned = gradient.movedim(-1, 2)
        made = torch.empty(turned.shape, dtype=context.precision, device=turned.device)
        return made.copy_(turned), None


def _kernels_for(source: torch.Tensor, target: torch.dtype, kernel: torch.Size) -> Any:
    """A kernel that copies whole lines of memory, where there is one."""
    kernels = proven_kernels("filter_kernel", source)
    if kernels is None or not kernels.can_exchange(source, target, kernel.numel()):
        return None
    return kernels
