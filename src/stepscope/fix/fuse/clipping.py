"""Gradients of stacked weights, clipped model by model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


def clip_each(stacks: Sequence[torch.Tensor], most: float | Sequence[float]) -> torch.Tensor:
    """As torch.nn.utils.clip_grad_norm_ for each model; every model's norm before."""
    gradients = [stack.grad for stack in stacks if stack.grad is not None]
    if not gradients:
        raise UsageError("there is no gradient to clip. Call array.backward(loss) first")
    norms = torch.stack([one.flatten(1).norm(dim=1) for one in gradients]).norm(dim=0)
    limits = torch.as_tensor(most, dtype=norms.dtype, device=norms.device)
    if limits.dim() and len(limits) != len(norms):
        raise UsageError(f"{len(limits)} limits for {len(norms)} models: give one, or one for each")
    factors = (limits / (norms + 1e-6)).clamp(max=1.0)
    for one in gradients:
        one.mul_(factors.reshape(-1, *(1,) * (one.dim() - 1)))
    return norms
