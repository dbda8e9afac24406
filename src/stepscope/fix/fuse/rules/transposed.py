"""Transposed convolutions with channels last: their gradients lie as the compiler expects.

torch's compiler is told a layout for the gradients of a transposed convolution that cuDNN does not
always give (pytorch issues 171622 and 197517): compiled backward passes then end with an error.
While a step is compiled, the gradients are computed by an operator that always gives this layout.
"""

from __future__ import annotations

from typing import Any

import torch

from stepscope.fix.fuse.rules.filters import LAST
from stepscope.fix.fuse.rules.taps import each_dimension


def convolve_transposed_last(
    func: Any,
    pictures: torch.Tensor,
    filters: torch.Tensor,
    bias: torch.Tensor | None,
    *settings: Any,
) -> torch.Tensor:
    """As `func`, of pictures and filters with channels last."""
    if not torch.compiler.is_compiling():
        made: torch.Tensor = func(pictures, filters, bias, *settings)
        return made
    # The cast is autocast's. A bias that is added here is compiled with what comes after it.
    made = _Transposed.apply(func, pictures.to(filters.dtype), filters, settings)
    if bias is not None:
        made = made + bias.to(made.dtype).view(-1, *[1] * (made.dim() - 2))
    return made


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, func: Any, pictures: torch.Tensor, filters: torch.Tensor, settings: Any
    ) -> torch.Tensor:
        context.save_for_backward(pictures, filters)
        context.settings = settings
        made: torch.Tensor = func(pictures, filters, None, *settings)
        return made

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        pictures, filters = context.saved_tensors
        stride, padding, output_padding, groups, dilation = context.settings
        lists = (
            list(each_dimension(one, pictures.dim() - 2))
            for one in (stride, padding, output_padding, dilation)
        )
        wanted = list(context.needs_input_grad[1:3])
        made = transposed_gradients(gradients[0], pictures, filters, *lists, groups, wanted)
        own = (one if is_wanted else None for one, is_wanted in zip(made, wanted, strict=True))
        return None, *own, None


def _gradients(
    gradient: torch.Tensor,
    pictures: torch.Tensor,
    filters: torch.Tensor,
    stride: list[int],
    padding: list[int],
    output_padding: list[int],
    dilation: list[int],
    groups: int,
    wanted: list[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of pictures and filters; an empty tensor in place of one that is not wanted."""
    settings = (stride, padding, dilation, True, output_padding, groups, [*wanted, False])
    made = torch.ops.aten.convolution_backward(gradient, pictures, filters, None, *settings)
    of_pictures, of_filters = (
        _laid_out(one, like) if is_wanted else like.new_empty(0)
        for one, like, is_wanted in zip(made[:2], (pictures, filters), wanted, strict=True)
    )
    return of_pictures, of_filters


def _as_told(
    gradient: torch.Tensor, pictures: torch.Tensor, filters: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the compiler is told of the results; `wanted` comes last."""
    of_pictures, of_filters = (
        _channels_last_like(like) if is_wanted else like.new_empty(0)
        for like, is_wanted in zip((pictures, filters), rest[-1], strict=True)
    )
    return of_pictures, of_filters


def _laid_out(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """To the last stride: `contiguous` takes any for dimensions of one element."""
    target = _channels_last_like(like)
    return made if made.stride() == target.stride() else target.copy_(made)


def _channels_last_like(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, memory_format=LAST[like.dim()])


transposed_gradients: Any = torch.library.custom_op(
    "stepscope::transposed_gradients", _gradients, mutates_args=()
)
transposed_gradients.register_fake(_as_told)
