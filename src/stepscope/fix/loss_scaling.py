"""A GradScaler for a script that has none: fp16 gradients would underflow without it.

The loss is scaled when backward begins. Gradients are unscaled before they are clipped, at the
latest when the optimizer steps; a step with infinite gradients is skipped.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepscope.fix.building import Made
    from stepscope.fix.training_process import TrainingProcess


class LossScaling:
    """For one optimizer. Once refused, the script trains on as if nothing had been injected."""

    def __init__(self, training: TrainingProcess) -> None:
        self.is_on = True
        self._tell, self._refuse = training.telling(), training.refusing()
        self._optimizer: Any = None
        self._scaler: Any = None
        self._building = False
        self._stepping = False
        self._scaled = False  # the gradients now are
        self._backward_ran = False  # since the last step
        training.after_building("scaler", self._scaler_built)
        training.after_building("optimizer", self._optimizer_built)
        training.before_backward(self._scale)
        training.before_clipping(self._unscale)
        training.before_step(self._before_any_step)

    def _give_up(self, why: str, *others: Any) -> None:
        """Gradients that are scaled now are unscaled by hand, those of `others` too."""
        self._refuse(why)
        self.is_on = False
        if self._scaled:
            scale = self._scaler.get_scale()
            for parameter in _parameters_of([self._optimizer, *others]):
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
            self._scaled = False

    def _scaler_built(self, _made: Made) -> None:
        if not self._building:
            self._give_up("the script has its own GradScaler")

    def _optimizer_built(self, made: Made) -> None:
        import torch

        if self._optimizer is not None:
            self._give_up("the script has several optimizers")
            return
        if any(p.dtype == torch.float16 for p in _parameters_of([made.object])):
            self._give_up("parameters are fp16, so their gradients cannot be unscaled")
            return
        self._optimizer = made.object
        original = made.object.step

        def step(_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._wants_step(args, kwargs):
                return self._step()
            return original(*args, **kwargs)

        made.object.step = MethodType(step, made.object)  # schedulers expect a method

    def _scale(self, outputs: Any) -> Any:
        if not self.is_on or self._optimizer is None:
            return None
        import torch

        if self._scaler is None:
            device = next(_parameters_of([self._optimizer])).device.type
            self._building = True
            self._scaler = torch.amp.GradScaler(device)
            self._building = False
            self._tell("the loss is scaled by a GradScaler")
        with torch.enable_grad():
            scaled = self._scaler.scale(outputs)
        self._scaled = self._backward_ran = True
        return scaled

    def _unscale(self) -> None:
        if self._scaled and self._has_gradients():
            self._scaler.unscale_(self._optimizer)
            self._scaled = False

    def _wants_step(self, args: Any, kwargs: Any) -> bool:
        """Whether this call of optimizer.step goes through the scaler."""
        if self._stepping or not self.is_on:
            return False
        if any(value is not None for value in (*args, *kwargs.values())):
            self._give_up("the optimizer computes the loss in a closure")
            return False
        return self._backward_ran and self._has_gradients()

    def _step(self) -> Any:
        self._stepping = True
        try:
            result = self._scaler.step(self._optimizer)
        finally:
            self._stepping = False
        self._scaler.update()
        self._scaled = self._backward_ran = False
        return result

    def _before_any_step(self, optimizer: Any) -> None:
        """An optimizer that is none of torch's was not seen when it was built."""
        if self.is_on and optimizer is not self._optimizer:
            self._give_up(f"{type(optimizer).__name__} steps, which is not torch's own", optimizer)

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in _parameters_of([self._optimizer]))


def _parameters_of(optimizers: Iterable[Any]) -> Any:
    """Each once."""
    groups = [group for one in optimizers if one is not None for group in one.param_groups]
    return iter({id(p): p for group in groups for p in group["params"]}.values())
