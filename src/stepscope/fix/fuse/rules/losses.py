"""Losses: one for each model, averaged over its own batch alone."""

from __future__ import annotations

from typing import Any

from stepscope.fix.fuse.rules.registry import count_of, front_of, is_tensor, rule_for
from stepscope.fix.fuse.stacked import Stacked


@rule_for("cross_entropy", "nll_loss")
def by_class(
    func: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    old = weight is not None or size_average is not None or reduce is not None
    if old or input.dim() < 2:
        return NotImplemented
    count = count_of(input, target)
    scores, wanted = front_of(input, count), front_of(target, count)
    smooth = {"label_smoothing": label_smoothing} if func.__name__ == "cross_entropy" else {}
    losses = func(
        scores.flatten(0, 1),
        wanted.flatten(0, 1),
        ignore_index=ignore_index,
        reduction="none",
        **smooth,
    ).unflatten(0, (count, -1))
    if reduction == "none":
        return Stacked(losses, count)
    total = losses.reshape(count, -1).sum(1)
    if reduction == "sum":
        return Stacked(total, count)
    if wanted.is_floating_point():  # shares of each class
        return Stacked(total / (losses[0].numel()), count)
    counted = (wanted != ignore_index).reshape(count, -1).sum(1)
    return Stacked(total / counted, count)


@rule_for(
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "soft_margin_loss",
)  # fmt: skip
def by_element(func: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    reduction = kwargs.pop("reduction", "mean")
    old = kwargs.get("size_average") is not None or kwargs.get("reduce") is not None
    if args or old or any(is_tensor(value) for value in kwargs.values()):
        return NotImplemented
    if input.shape != target.shape:
        return NotImplemented
    count = count_of(input, target)
    losses = func(front_of(input, count), front_of(target, count), reduction="none", **kwargs)
    if reduction == "none":
        return Stacked(losses, count)
    flat = losses.reshape(count, -1)
    if reduction == "batchmean":
        return Stacked(flat.sum(1) / input.shape[0], count)
    return Stacked(flat.mean(1) if reduction == "mean" else flat.sum(1), count)
