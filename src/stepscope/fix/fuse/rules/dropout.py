"""Dropout: each model draws what it would draw alone, from a stream of its own."""

from __future__ import annotations

from typing import Any

import torch

from stepscope.fix.fuse.model_streams import streams
from stepscope.fix.fuse.rules.registry import rule_for
from stepscope.fix.fuse.stacked import Stacked

_OUT_OF_PLACE = {"dropout_": torch.dropout, "feature_dropout_": torch.feature_dropout}


@rule_for("dropout", "dropout1d", "dropout2d", "dropout3d", "dropout_", "feature_dropout")
def dropout(
    func: Any,
    input: Any,
    p: Any = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    """`p` may differ from model to model: fuse() makes a PerModel of it."""
    shares = p.values if isinstance(p, PerModel) else (p,) * input.count
    if not training or not any(shares):
        return input
    if inplace or func.__name__.endswith("_"):
        input.separate()
        dropped = dropout(_OUT_OF_PLACE.get(func.__name__, func), input, p, training)
        input.physical, input.order = dropped.physical, dropped.order
        return input
    if streams().together:
        return _drop_together(func, input, shares)
    fronts = input.front()
    dropped = []
    for model, (one, share) in enumerate(zip(fronts.unbind(0), shares, strict=True)):
        with streams().of(model):
            # A GPU's kernel draws by place in memory, and alone the tensor has no gaps.
            own = one if one.is_contiguous() else one.clone()
            dropped.append(func(own, float(share), training))
    return Stacked(torch.stack(dropped), input.count)


def _drop_together(func: Any, input: Stacked, shares: tuple[Any, ...]) -> Stacked:
    """One kernel for all models: all elements are drawn alike, whoever's they are."""
    if any(share != shares[0] for share in shares):
        by_share = {share: func(input.front(), float(share), True) for share in set(shares)}
        parts = [by_share[share][model] for model, share in enumerate(shares)]
        return Stacked(torch.stack(parts), input.count)
    share = float(shares[0])
    if func.__name__ in ("dropout", "dropout_"):
        return Stacked(func(input.physical, share, True), input.count, input.order)
    if input.dim() < 3:
        return Stacked(func(input.front(), share, True), input.count)
    return Stacked(func(input.channels(), share, True), input.count, "channel")


class PerModel:
    """A setting of which each model has its own value."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    def __repr__(self) -> str:
        return f"PerModel{self.values}"

    def __lt__(self, other: float) -> bool:
        return any(value < other for value in self.values)

    def __gt__(self, other: float) -> bool:
        return any(value > other for value in self.values)


class PerModelShare(PerModel, float):
    """One that torch takes for a number: the largest."""

    def __new__(cls, values: tuple[float, ...]) -> PerModelShare:
        return float.__new__(cls, max(values))
