"""Dropout: each model draws what it would draw alone, from a stream of its own."""

from __future__ import annotations

from typing import Any

import torch

from stepscope.fix.fuse.model_streams import streams
from stepscope.fix.fuse.rules.registry import rule_for
from stepscope.fix.fuse.stacked import Stacked


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
    fronts = input.front()
    dropped = []
    for model, (one, share) in enumerate(zip(fronts.unbind(0), shares, strict=True)):
        with streams().of(model):
            dropped.append(func(one, float(share), training))
    return Stacked(torch.stack(dropped), input.count)


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
