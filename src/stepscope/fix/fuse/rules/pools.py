"""Pools: windows of pictures, whoever's channels they are."""

from __future__ import annotations

from typing import Any

from stepscope.fix.fuse.rules.registry import is_tensor, rule_for
from stepscope.fix.fuse.stacked import Stacked

_KINDS = ("max_pool", "avg_pool", "lp_pool", "adaptive_max_pool", "adaptive_avg_pool")
_NAMES = [f"{kind}{ndim}d" for kind in _KINDS for ndim in (1, 2, 3)]


@rule_for(*_NAMES)
def pool(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    if input.dim() != int(func.__name__[-2]) + 2:
        return NotImplemented
    made = func(input.channels(), *args, **kwargs)
    if not is_tensor(made):  # with indices, which count inside one channel
        return tuple(Stacked(one, input.count, "channel") for one in made)
    return Stacked(made, input.count, "channel")


@rule_for("max_unpool1d", "max_unpool2d", "max_unpool3d")
def unpool(func: Any, input: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(indices, Stacked) or input.dim() != int(func.__name__[-2]) + 2:
        return NotImplemented
    made = func(input.channels(), indices.channels(), *args, **kwargs)
    return Stacked(made, input.count, "channel")
