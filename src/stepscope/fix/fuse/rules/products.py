"""Matrix products: one batched product for all models."""

from __future__ import annotations

from typing import Any

import torch

from stepscope.fix.fuse.rules.registry import count_of, front_of, rule_for
from stepscope.fix.fuse.stacked import Stacked


@rule_for("linear")
def linear(func: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """A batch that all models share goes through one product with all their weights."""
    if not isinstance(weight, Stacked) or weight.dim() != 2:
        return NotImplemented
    count, (outputs, inputs) = weight.count, weight.shape
    shared = x if not isinstance(x, Stacked) else x.common
    if shared is not None:
        flat = None if bias is None else front_of(bias, count).reshape(-1)
        together = func(shared, weight.front().reshape(count * outputs, inputs), flat)
        if together.dim() == 2:
            return Stacked(together, count, "channel")
        return Stacked(together.unflatten(-1, (count, outputs)).movedim(-2, 0), count)
    rows = x.front().reshape(count, -1, inputs)
    turned = weight.front().transpose(1, 2)
    if bias is None:
        product = torch.bmm(rows, turned)
    else:
        product = torch.baddbmm(front_of(bias, count).unsqueeze(1), rows, turned)
    return Stacked(product.reshape(count, *x.shape[:-1], outputs), count)


@rule_for("matmul", "__matmul__", "__rmatmul__", "bmm", "mm")
def matmul(func: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
    if func.__name__ == "__rmatmul__":
        a, b = b, a
    if a.dim() < 2 or b.dim() < 2:
        return NotImplemented
    count, ndim = count_of(a, b), max(a.dim(), b.dim())
    fronts = []
    for value in (a, b):
        if isinstance(value, Stacked):
            ones = (1,) * (ndim - value.dim())
            fronts.append(value.front().reshape(count, *ones, *value.shape))
        else:
            fronts.append(value)
    return Stacked(torch.matmul(*fronts), count)


@rule_for("addmm", "baddbmm")
def addmm(func: Any, added: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product = (
        matmul(torch.matmul, a, b)
        if isinstance(a, Stacked) or isinstance(b, Stacked)
        else (torch.matmul(a, b))
    )
    return (added * beta + product * alpha).to(product.dtype)  # under autocast the sum is wider
