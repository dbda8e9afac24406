"""Norms: each model has its own channels or rows, so nothing is averaged over models."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from stepscope.fix.fuse.rules.registry import front_of, rule_for
from stepscope.fix.fuse.stacked import Stacked


def _flat(value: Any, count: int) -> torch.Tensor | None:
    """All models' channels in a row; a view, so that running statistics are updated in place."""
    if value is None:
        return None
    return front_of(value, count).reshape(-1)


@rule_for("batch_norm", "instance_norm")
def batch_norm(
    func: Any,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    stacked = next((one for one in (weight, running_mean, input) if isinstance(one, Stacked)), None)
    if stacked is None or input.dim() < 2:
        return NotImplemented
    count = stacked.count
    if not isinstance(input, Stacked):
        input = Stacked(front_of(input, count), count)
    channels = [_flat(one, count) for one in (running_mean, running_var, weight, bias)]
    if func.__name__ == "batch_norm" and input.order == "front" and input.dim() > 2:
        wide = input.front().transpose(1, 2)
        if wide.is_contiguous():  # as products leave it: the batch may as well be the rest
            made = func(wide.reshape(1, count * wide.shape[1], -1), *channels, *args, **kwargs)
            return Stacked(made.reshape(wide.shape).transpose(1, 2), count)
    return Stacked(func(input.channels(), *channels, *args, **kwargs), count, "channel")


@rule_for("group_norm")
def group_norm(
    func: Any,
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    if not isinstance(input, Stacked) or input.dim() < 2:
        return NotImplemented
    count = input.count
    made = func(input.channels(), num_groups * count, _flat(weight, count), _flat(bias, count), eps)
    return Stacked(made, count, "channel")


@rule_for("layer_norm", "rms_norm")
def layer_norm(
    func: Any,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = None,
) -> Any:
    if not isinstance(input, Stacked):
        return NotImplemented
    shape = tuple(normalized_shape)
    if func.__name__ == "rms_norm":
        made = functional.rms_norm(input.front(), shape, None, bias if bias is not None else eps)
        bias = None
    else:
        made = functional.layer_norm(input.front(), shape, None, None, 1e-5 if eps is None else eps)
    ones = (1,) * (input.dim() - len(shape))
    for affine, apply in ((weight, torch.mul), (bias, torch.add)):
        if affine is not None:
            front = front_of(affine, input.count).reshape(-1, *ones, *shape)
            made = apply(made, front).to(made.dtype)  # under autocast weights are wider
    return Stacked(made, input.count)


@rule_for("prelu")
def prelu(func: Any, input: Any, weight: Any) -> Any:
    """Each model's own slopes: one, or one for each channel."""
    if not isinstance(input, Stacked) or input.dim() < 2:
        return NotImplemented
    count, slopes = input.count, front_of(weight, input.count)
    pictures = input.channels()
    if slopes.shape[1] == 1:
        slopes = slopes.expand(count, input.shape[1])
    return Stacked(func(pictures, slopes.reshape(-1)), count, "channel")
