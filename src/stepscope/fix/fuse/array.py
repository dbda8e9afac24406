"""Train many models of one architecture as one: `fuse`, the array it returns, its gradient
clipping and loss scaling.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn

from stepscope.errors import UsageError
from stepscope.fix.fuse.architecture import check_alike, check_given, leave_stacks, place_of
from stepscope.fix.fuse.behaviours import modules_alone
from stepscope.fix.fuse.compiled import CapturedStep, CompiledFunction, check_can_compile
from stepscope.fix.fuse.joined_models import JoinedModels
from stepscope.fix.fuse.stacked import Stacked

if TYPE_CHECKING:
    from stepscope.fix.fuse.kernel_choice import Choose
    from stepscope.fix.fuse.random_streams import Draws

#     array = fuse(models, optimizers)
#     loss = cross_entropy(array(x), y)      # one loss for each model
#     array.zero_grad()
#     array.backward(loss)
#     array.step()
#
# The models stay yours: their parameters and buffers are windows into the array, so each can be
# looked at, evaluated or saved at any time as if it trained alone.


class ModelArray(JoinedModels):
    """Train several models as one; `fuse` makes it."""

    # Training.

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Each argument is one tensor that all models share, or a list with one for each model, or
        a Stacked; the result is Stacked."""
        given = self.arguments(inputs)
        known = self._shared({name: self.stack(one) for name, one in named.items()})
        with self._computing():
            return self._template[0](*given, **known)

    def apply_each(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """A function of each model's tensors, such as a loss, computed for all at once."""
        with self._computing():
            return function(*self.arguments(inputs))

    def drawing_as(self, model: int) -> AbstractContextManager[None]:
        """Meanwhile torch draws this model's random numbers, for what is its own, such as data."""
        return self._streams.of(model)

    def backward(self, loss: Any) -> None:
        """From every model's own loss: a Stacked, or a list."""
        if isinstance(loss, Stacked):
            loss.front().sum().backward()
        else:
            torch.stack([one.reshape(()) for one in loss]).sum().backward()
        self.gather_gradients()

    def step(self, skipped: Sequence[bool] | None = None) -> None:
        """Every model's optimizer, with its own settings; `skipped` models stay as they are."""
        if self.optimizer is None:
            raise UsageError(
                "these models were fused without optimizers. Write fuse(models, optimizers)"
            )
        self.gather_gradients()
        gradient = next((one.grad for one in self.parameters() if one.grad is not None), None)
        used = self._stepped_with() if self._stepped_with is not None else None
        if gradient is not None and used is gradient:
            raise UsageError(
                "array.step() finds the gradients of the last step again. Call "
                "array.zero_grad() between two steps. A model's own zero_grad, or its "
                "optimizer's, does not reach the fused models"
            )
        self._stepped_with = gradient if gradient is None else ref(gradient)
        self.optimizer.step(skipped)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._gradients.clear()
        self._stepped_with = None

    def graph(self, step: Callable[..., Any]) -> CapturedStep:
        """A whole step, which ends with `array.step()`, as one CUDA graph; see captured.py."""
        return CapturedStep(step, [self])

    def compile(self, function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """A function of each model's tensors, as for `apply_each`, by torch.compile with these
        options; without one, the models themselves. It may use this array, but no other."""
        check_can_compile(self._streams.together)
        return CompiledFunction(self, function or self.forward, options)

    def step_schedulers(self, metrics: Sequence[float] | None = None) -> None:
        """Every model's scheduler; `metrics` are one for each, where they take one."""
        for model, scheduler in enumerate(self._schedulers):
            if scheduler is not None:
                scheduler.step(*(() if metrics is None else (metrics[model],)))

    def clip_grad_norm_(self, most: float | Sequence[float]) -> torch.Tensor:
        """Each model's gradient on its own; returns every model's norm before."""
        self.gather_gradients()
        return clip_each(list(self.parameters()), most)

    def train(self, mode: bool = True) -> ModelArray:
        super().train(mode)
        for model in (*self._models, *self._template):
            model.train(mode)
        return self

    # The models.

    @property
    def schedulers(self) -> list[Any]:
        return list(self._schedulers)

    def state_of(self, model: int) -> dict[str, torch.Tensor]:
        """A plain state dict that loads into the unfused program."""
        own = self._models[model].state_dict()
        return {name: value.detach().clone() for name, value in own.items()}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """`state_dict(3)` is `state_of(3)`; all models' state is `checkpoint()`."""
        if len(args) == 1 and isinstance(args[0], int) and not kwargs:
            return self.state_of(args[0])
        raise UsageError("state_dict(i) is for one model. For all models write array.checkpoint()")

    def export(self, model: int) -> nn.Module:
        """A copy of one model with tensors of its own."""
        return copy.deepcopy(self._models[model])

    def load(self, model: int, state: dict[str, Any]) -> None:
        self._models[model].load_state_dict(state)

    def evict(self, model: int) -> nn.Module:
        """Take one model out of the array; the others go on, and memory shrinks."""
        if len(self) == 1:
            raise UsageError("the last model cannot be removed")
        model = place_of(model, len(self))
        gone = self._models[model]
        kept = [number for number in range(len(self)) if number != model]
        if self.optimizer is not None:
            self.optimizer.export(model)
        leave_stacks(gone)
        self._take(kept, ())
        return gone

    def admit(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        seed: int | None = None,
        random: list[Any] | None = None,
    ) -> int:
        """Add a model at the end; its place. `random` is the state of its random numbers."""
        check_given([*self._models, model])
        modules_alone([*self._models, model])
        check_alike([self._models[0], model])
        if (self.optimizer is None) != (optimizer is None):
            raise UsageError(
                "give the new model an optimizer if the fused models have some, and none if they "
                "have none"
            )
        self._take(list(range(len(self))), (model,), optimizer, scheduler, seed)
        if random is not None:
            self._streams.states[-1] = list(random)
        return len(self) - 1

    def release(self) -> None:
        """All models and optimizers are their own again; this array trains no more."""
        self._gradients.leave()
        for place, model in enumerate(self._models):
            if self.optimizer is not None:
                self.optimizer.export(place)
            leave_stacks(model)
        if self.optimizer is not None:
            self.optimizer.leave()

    def cut(self, place: int) -> tuple[ModelArray, ModelArray]:
        """Two arrays in the memory of this one: its models before this place, and the rest."""
        return self._window(slice(0, place)), self._window(slice(place, len(self)))

    def checkpoint(self) -> dict[str, Any]:
        """Return what training goes on from: weights, optimizers, schedulers, random numbers."""
        return {
            "models": [self.state_of(model) for model in range(len(self))],
            "optimizer": self.optimizer.checkpoint() if self.optimizer is not None else None,
            "schedulers": [copy.deepcopy(one and one.state_dict()) for one in self._schedulers],
            "random": [list(states) for states in self._streams.states],
        }

    def resume(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint, to the bit."""
        if len(saved["models"]) != len(self):
            raise UsageError(f"the checkpoint has {len(saved['models'])} models, not {len(self)}")
        for model, state in enumerate(saved["models"]):
            self.load(model, state)
        if self.optimizer is not None:
            self.optimizer.resume(saved["optimizer"])
        for scheduler, state in zip(self._schedulers, saved["schedulers"], strict=True):
            if scheduler is not None:
                scheduler.load_state_dict(state)
        self._streams.states = [list(states) for states in saved["random"]]

    def report(self) -> dict[str, Any]:
        """How each function was computed so far; what computes one by one, why, at what cost."""
        return {
            "models": len(self),
            "functions": self._ledger.times_by_way(),
            "one_by_one": dict(self._alone),
            "one_by_one_ms": self._ledger.cost_ms(),
            "choices": self.chooser.choices(),
        }

    # Inside.

    def _window(self, part: slice) -> ModelArray:
        joined = self.optimizer
        self._gradients.leave()
        if joined is not None:
            joined.leave()
        array = ModelArray(
            self._models[part],
            joined.optimizers[part] if joined is not None else (),
            self._schedulers[part],
            random=self._streams.states[part],
            draws="together" if self._streams.together else "own",
            in_place=True,
        )
        if joined is not None and array.optimizer is not None:
            array.optimizer.restore(joined.states_of(part))
        array.training, array.chooser = self.training, self.chooser
        array._ledger, array._alone, array._proven = self._ledger, self._alone, self._proven
        return array


def fuse(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer] = (),
    schedulers: Sequence[Any] = (),
    seeds: Sequence[int | None] | None = None,
    random: Sequence[list[Any]] | None = None,
    draws: Draws = "own",
    choose: Choose | None = None,
) -> ModelArray:
    """Train models of one architecture together, each with its own optimizer and scheduler.

    `seeds`: what torch.manual_seed would get before each model trains alone; it then draws the
    same numbers here. `random` are states to go on from instead (random_states.states_now).
    `draws="together"`: dropout draws for all models at once, much faster on a GPU, but other
    numbers than each would draw alone; captured and compiled steps need it.
    `choose="measure"`: where an operator can be computed in several ways, each is measured once
    on this device (usual on a GPU); "rules": none is (usual on a CPU).
    """
    return ModelArray(models, optimizers, schedulers, seeds, random, draws, choose)


# A GradScaler for each model of an array: an overflow in one does not skip the others' steps.
#
#     scaler = ArrayScaler(len(array))
#     array.backward(scaler.scale(loss))
#     scaler.step(array)
#     scaler.update()
#
# Scales grow and shrink as those of torch.amp.GradScaler do.


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


# Gradients of stacked weights, clipped model by model.


def clip_each(stacks: Sequence[torch.Tensor], most: float | Sequence[float]) -> torch.Tensor:
    """Clip each model's gradient as clip_grad_norm_ does; return every model's norm before."""
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
