"""A GradScaler for each model of an array: an overflow in one does not skip the others' steps.

    scaler = ArrayScaler(len(array))
    array.backward(scaler.scale(loss))
    scaler.step(array)
    scaler.update()

Scales grow and shrink as those of torch.amp.GradScaler do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stepscope.errors import UsageError
from stepscope.fix.fuse.stacked import Stacked

if TYPE_CHECKING:
    from stepscope.fix.fuse.array import ModelArray


class ArrayScaler:
    """One scale for each model."""

    def __init__(
        self,
        models: int,
        *,
        first_scale: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ) -> None:
        self._first_scale = first_scale
        self.scales = torch.full((models,), first_scale)
        self._growth, self._backoff, self._interval = growth, backoff, interval
        self._good = torch.zeros(models, dtype=torch.long)
        self._overflowed = torch.zeros(models, dtype=torch.bool)
        self._unscaled = False

    def evict(self, model: int) -> None:
        """The model has left the array."""
        self._keep([place for place in range(len(self.scales)) if place != model])

    def admit(self) -> None:
        """A model has joined the array, at the end."""
        self.scales = torch.cat([self.scales, torch.tensor([self._first_scale])])
        self._good = torch.cat([self._good, self._good.new_zeros(1)])
        self._overflowed = torch.cat([self._overflowed, self._overflowed.new_zeros(1)])

    def _keep(self, places: list[int]) -> None:
        self.scales, self._good = self.scales[places], self._good[places]
        self._overflowed = self._overflowed[places]

    def scale(self, loss: Stacked) -> Stacked:
        """Each model's loss times its own scale."""
        if loss.count != len(self.scales):
            raise UsageError(
                f"this scaler has {len(self.scales)} models, the loss {loss.count}. Call "
                "scaler.evict(i) or scaler.admit() together with the array's"
            )
        return Stacked(loss.front() * self.scales.to(loss.device), loss.count)

    def unscale_(self, array: ModelArray) -> None:
        """Before clipping; `step` does it otherwise."""
        if self._unscaled:
            return
        array.gather_gradients()
        finite = []
        columns: dict[Any, torch.Tensor] = {}
        for stack in array.parameters():
            if stack.grad is None:
                continue
            kind = (stack.device, stack.grad.dtype)
            if kind not in columns:
                columns[kind] = (1 / self.scales.double()).to(*kind)
            stack.grad.mul_(columns[kind].reshape(-1, *(1,) * (stack.dim() - 1)))
            finite.append(torch.isfinite(stack.grad.flatten(1)).all(1))
        self._overflowed = torch.zeros_like(self._overflowed)
        if finite:  # the host reads once
            self._overflowed = ~torch.stack(finite).all(0).cpu()
        self._unscaled = True

    def step(self, array: ModelArray) -> None:
        """Models whose gradients are not finite stay as they are."""
        self.unscale_(array)
        array.step(self._overflowed.tolist() if bool(self._overflowed.any()) else None)

    def update(self) -> None:
        self._good = torch.where(self._overflowed, 0, self._good + 1)
        grows = self._good == self._interval
        self._good = torch.where(grows, 0, self._good)
        factor = torch.where(self._overflowed, self._backoff, torch.where(grows, self._growth, 1.0))
        self.scales = self.scales * factor
        self._unscaled = False

    def state_dict(self) -> dict[str, Any]:
        return {"scales": self.scales.clone(), "good": self._good.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scales, self._good = state["scales"].clone(), state["good"].clone()
