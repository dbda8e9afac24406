"""The user's own optimizers: which an array can take, and what they did before or do besides."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """UsageError for one that an array cannot step."""
    if len({id(one) for one in optimizers}) < len(optimizers):
        raise UsageError("every fused model needs its own optimizer, but one is given twice")
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise UsageError(
                f"{name} needs sparse gradients, which fused models do not support. Use Adam"
            )
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"{name} computes the loss several times per step, which fused models cannot. "
                "Use another optimizer"
            )


def steps_in_its_own_way(optimizer: torch.optim.Optimizer) -> bool:
    """Whether more than torch's own update happens in its step: hooks, or another step."""
    own = [hook for kind in _STEP_HOOKS for hook in getattr(optimizer, kind).values()]
    of_all = [hook for kind in _GLOBAL_HOOKS for hook in getattr(torch_optimizer, kind).values()]
    if any(not isinstance(hook, StepGuard) for hook in own):
        return True
    if any(not (getattr(hook, "__module__", "") or "").startswith("stepscope.") for hook in of_all):
        return True
    step = vars(optimizer).get("step")
    return step is not None and not hasattr(step, "_wrapped_by_lr_sched")


class StepGuard:
    """Refuses a step of an array's optimizers by the user, who would find no gradients, and brings
    their states to where the user looks, and from there."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        write: Callable[[int], None],
        read: Callable[[int], None],
    ) -> None:
        """`write` one model's state into its own optimizer; `read` what the user loaded there."""
        self._is_open = False
        self._handles: list[Any] = [one.register_step_pre_hook(self) for one in optimizers]
        for model, one in enumerate(optimizers):
            self._handles += [
                one.register_state_dict_pre_hook(partial(_call, write, model)),
                one.register_load_state_dict_post_hook(partial(self._loaded, read, model)),
            ]

    def _loaded(self, read: Callable[[int], None], model: int, _optimizer: Any) -> None:
        if not self._is_open:
            read(model)

    def __call__(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self._is_open:
            raise UsageError(
                "this optimizer belongs to fused models, whose gradients it cannot see. "
                "array.step() steps all models. array.evict(i) gives a model back"
            )

    @contextmanager
    def allowed(self) -> Iterator[None]:
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()


def _call(act: Callable[[int], None], model: int, _optimizer: Any) -> None:
    act(model)


def state_before(own: Sequence[dict[str, Any]], stack: torch.Tensor) -> dict[str, torch.Tensor]:
    """The states of one weight of all models, stacked; zero for a model that has none."""
    kinds = dict.fromkeys(kind for state in own for kind in state if state[kind] is not None)
    if not kinds:
        return {}
    stacked: dict[str, torch.Tensor] = {}
    for kind in kinds:
        if kind == "step":
            continue
        values = [state.get(kind) for state in own]
        shape = torch.zeros_like(stack[0])
        if any(one is not None and one.shape != shape.shape for one in values):
            raise UsageError(f"an optimizer's {kind} from before has another shape than its weight")
        stacked[kind] = torch.stack([shape if one is None else one.to(shape) for one in values])
    steps = [float(state.get("step", 1.0 if state else 0.0)) for state in own]
    stacked["step"] = torch.tensor(steps, dtype=torch.float64, device=stack.device)
    return stacked
