"""Convolutions: one with a group, or groups, for each model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.fix.fuse.rules.registry import front_of, rule_for
from stepscope.fix.fuse.stacked import Stacked

if TYPE_CHECKING:
    import torch


@rule_for("conv1d", "conv2d", "conv3d")
def convolve(
    func: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """A batch that all models share needs no groups: all their filters see the same channels."""
    if not isinstance(weight, Stacked) or input.dim() != weight.dim():
        return NotImplemented
    count = weight.count
    filters = weight.front().flatten(0, 1)
    flat = None if bias is None else front_of(bias, count).reshape(-1)
    shared = input if not isinstance(input, Stacked) else input.common
    if shared is not None and groups == 1:
        pictures = shared
    else:
        pictures, groups = _channels(input, count), groups * count
    return Stacked(
        func(pictures, filters, flat, stride, padding, dilation, groups), count, "channel"
    )


@rule_for("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolve_transposed(
    func: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    if not isinstance(weight, Stacked) or input.dim() != weight.dim():
        return NotImplemented
    count = weight.count
    filters = weight.front().flatten(0, 1)
    flat = None if bias is None else front_of(bias, count).reshape(-1)
    pictures = _channels(input, count)
    made = func(pictures, filters, flat, stride, padding, output_padding, groups * count, dilation)
    return Stacked(made, count, "channel")


def _channels(pictures: Any, count: int) -> torch.Tensor:
    if isinstance(pictures, Stacked):
        return pictures.channels()
    return Stacked.share(pictures, count).channels()


@rule_for("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
def shuffle(func: Any, input: Any, factor: int) -> Any:
    """Each model's channels lie together and are a multiple of the factor's square."""
    if input.dim() != 4 or func.__name__ == "channel_shuffle":
        return NotImplemented
    return Stacked(func(input.channels(), factor), input.count, "channel")


@rule_for("interpolate", "upsample")
def resize(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    if input.dim() < 3:
        return NotImplemented
    return Stacked(func(input.channels(), *args, **kwargs), input.count, "channel")


@rule_for("pad")
def pad(func: Any, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    spatial = len(pad) // 2
    if input.order == "channel" and spatial <= input.dim() - 2:
        return Stacked(func(input.physical, pad, mode, value), input.count, "channel")
    if mode != "constant":
        if spatial > input.dim() - 2 or input.dim() < 3:
            return NotImplemented
        return Stacked(func(input.channels(), pad, mode, value), input.count, "channel")
    return Stacked(func(input.front(), pad, mode, value), input.count)


@rule_for("unfold")
def unfold(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    if func.__module__ != "torch.nn.functional" or input.dim() != 4:
        return NotImplemented
    return Stacked(func(input.channels(), *args, **kwargs), input.count, "channel")
