"""Everything in a module, a tensor, autograd and the user's optimizers that can carry
behaviour an array would miss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.nn.parameter import is_lazy
from torch.nn.utils import prune
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import optimizer as torch_optimizer

from stepscope.errors import UsageError

if TYPE_CHECKING:
    Found = Iterator[tuple[str, str]]
    Check = Callable[[Sequence[nn.Module]], Found]

# One row for each: what it is, and what fuse does about it. `ALL_AT_ONCE`: computed for all models
# together. `ALONE`: each model's own module computes. `FOLLOWED`: what it does reaches every model.
# `REFUSED`: a UsageError says so before the first step that would be wrong. A row's `check` looks
# at the models; rows without one are decided where the code runs, in the file that is named.

ALL_AT_ONCE, ALONE, FOLLOWED, REFUSED = "all at once", "alone", "followed", "refused"
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
    "_global_backward_pre_hooks",
)  # fmt: skip
_PLAIN_HOOKS = (WeightNorm, prune.BasePruningMethod)  # compute a weight, and keep nothing
_PLAIN = (torch.Tensor, nn.Parameter)
_WRAPPERS = {
    "DistributedDataParallel": "fuse the module inside: fused models train in one process",
    "DataParallel": "fuse the module inside",
    "FullyShardedDataParallel": "fuse the module inside: fused models train in one process",
    "OptimizedModule": "fuse the plain models, then call array.compile(...)",
}


class Behaviour(NamedTuple):
    what: str
    answer: str
    where: str = ""  # the file that decides while the code runs
    check: Check | None = None


def modules_alone(models: Sequence[nn.Module]) -> dict[str, str]:
    """UsageError for what cannot be right; modules that compute alone from the start, and why."""
    alone: dict[str, str] = {}
    for row in BEHAVIOURS:
        for path, words in row.check(models) if row.check is not None else ():
            if row.answer == REFUSED:
                raise UsageError(words)
            alone.setdefault(path, words)
    return alone


def _modules(models: Sequence[nn.Module]) -> Iterator[tuple[int, str, nn.Module]]:
    for number, model in enumerate(models):
        for path, module in model.named_modules():
            yield number, path, module


def _tensors(models: Sequence[nn.Module]) -> Iterator[tuple[int, str, torch.Tensor]]:
    for number, model in enumerate(models):
        for name, weight in model.named_parameters(remove_duplicate=False):
            yield number, name, weight
        for name, buffer in model.named_buffers(remove_duplicate=False):
            yield number, name, buffer


def hooks_made() -> int:
    """How many hooks of any kind this process has registered: another number, new hooks."""
    return int(torch.utils.hooks.RemovableHandle.next_id)


def own_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks that one call for all models would not be right for."""
    hooks = [hook for kind in _HOOKS for hook in getattr(module, kind).values()]
    return any(not isinstance(hook, _PLAIN_HOOKS) for hook in hooks)


def _module_hooks(models: Sequence[nn.Module]) -> Found:
    for _, path, module in _modules(models):
        if own_hooks(module):
            yield path, "it has hooks, which each model's module must call"


def _own_forward(models: Sequence[nn.Module]) -> Found:
    for _, path, module in _modules(models):
        own: Any = vars(module).get("forward")
        if own is not None and getattr(own, "__self__", None) is not module:
            yield path, "its forward was set on the module itself, not on its class"


def _global_hooks(_models: Sequence[nn.Module]) -> Found:
    words = (
        "a hook for all modules (such as by register_module_forward_hook) would run once for all "
        "fused models. Register it on the modules, or remove it before the fused models compute"
    )
    for hook in (hook for name in _GLOBAL_HOOKS for hook in getattr(torch_modules, name).values()):
        if not (getattr(hook, "__module__", "") or "").startswith("stepscope."):
            yield "", words


def _wrapped(models: Sequence[nn.Module]) -> Found:
    for number, path, module in _modules(models):
        advice = _WRAPPERS.get(type(module).__name__)
        if advice and type(module).__module__.startswith("torch."):
            name = f"{path} of model {number}" if path else f"model {number}"
            yield path, f"{name} is a {type(module).__name__}: {advice}"


def _lazy(models: Sequence[nn.Module]) -> Found:
    for number, name, tensor in _tensors(models):
        if is_lazy(tensor):
            words = f"{name} of model {number} has no shape yet. Call every model once before fuse"
            yield "", words


def _unusual_tensors(models: Sequence[nn.Module]) -> Found:
    for number, name, tensor in _tensors(models):
        if type(tensor) not in _PLAIN and not is_lazy(tensor):
            words = f"a {type(tensor).__name__}, a tensor with code of its own"
        elif tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            words = f"a {'quantized' if tensor.is_quantized else tensor.layout} tensor"
        elif tensor.is_meta:
            words = "a meta tensor, without values"
        elif not tensor.is_leaf:
            words = "computed from other tensors, not a leaf"
        else:
            continue
        yield "", f"{name} of model {number} is {words}: fuse stacks ordinary tensors only"


def _hooks_after_gradients(models: Sequence[nn.Module]) -> Found:
    for number, model in enumerate(models):
        for name, tensor in model.named_parameters():
            hooks = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
            if any(not hasattr(hook, "of_fuse") for hook in hooks.values()):
                words = (
                    f"{name} of model {number} has a hook by "
                    "register_post_accumulate_grad_hook, which would find no gradient. The "
                    "gradients of fused models lie in array.parameters(). Do its work "
                    "between array.backward and array.step"
                )
                yield "", words


def _memory_of_two(models: Sequence[nn.Module]) -> Found:
    """Two tensors in one memory would be apart in the array."""
    spans: list[tuple[int, int, str, int, int]] = []
    for number, name, tensor in _tensors(models):
        if tensor.numel() and not is_lazy(tensor) and not tensor.is_meta:
            begin, pairs = tensor.data_ptr(), zip(tensor.shape, tensor.stride(), strict=True)
            elements = 1 + sum((size - 1) * step for size, step in pairs)
            end = begin + elements * tensor.element_size()
            spans.append((begin, end, name, number, id(tensor)))
    spans.sort()
    for first, second in pairwise(spans):
        tied = first[4] == second[4] and first[3] == second[3]
        if second[0] < first[1] and not tied:
            words = (
                f"{first[2]} of model {first[3]} and {second[2]} of model {second[3]} share "
                "memory, but fused models cannot. Give each a tensor of its own"
            )
            yield "", words


def _modes(models: Sequence[nn.Module]) -> Found:
    first = {path: module.training for path, module in models[0].named_modules()}
    for number, path, module in _modules(models):
        if first.get(path, module.training) != module.training:
            here, there = (("eval", "train")[one] for one in (first[path], module.training))
            words = (
                f"{path or 'it'} is in {there} mode in model {number} and in {here} mode "
                "in model 0. Call train() or eval() on that module of every model"
            )
            yield "", words


BEHAVIOURS = (
    # Modules.
    Behaviour("hooks on the model and its modules", ALONE, check=_module_hooks),
    Behaviour("hooks of weight_norm and pruning", ALL_AT_ONCE, "behaviours.py"),
    Behaviour("hooks for all modules", REFUSED, check=_global_hooks),
    Behaviour("forward of an instance", ALONE, check=_own_forward),
    Behaviour("wrappers: DDP, DataParallel, FSDP, compiled modules", REFUSED, check=_wrapped),
    Behaviour("train and eval mode that differs between models", REFUSED, check=_modes),
    Behaviour("train and eval mode of some modules", FOLLOWED, "python_state.py"),
    Behaviour("parametrizations", ALL_AT_ONCE, "rules/"),
    Behaviour("modules or weights made in forward", REFUSED, "stacks.py"),
    Behaviour("modules and weights replaced or added after fuse", FOLLOWED, "stacks.py"),
    # State in Python.
    Behaviour("numbers, lists and tensors that forward keeps", FOLLOWED, "python_state.py"),
    Behaviour("attributes changed after fuse", FOLLOWED, "python_state.py"),
    Behaviour("attributes that differ between models", ALONE, "architecture.py"),
    Behaviour("closures, iterators, generators and other objects", ALONE, "architecture.py"),
    Behaviour("random and numpy.random in forward", REFUSED, "random_streams.py"),
    # Tensors of the models.
    Behaviour("weights without a shape yet", REFUSED, check=_lazy),
    Behaviour("tensors of other classes and layouts", REFUSED, check=_unusual_tensors),
    Behaviour("memory that two tensors or models share", REFUSED, check=_memory_of_two),
    Behaviour("tied weights", ALL_AT_ONCE, "stacks.py"),
    Behaviour("requires_grad that differs between models", REFUSED, "architecture.py"),
    Behaviour("requires_grad changed after fuse", FOLLOWED, "stacks.py"),
    Behaviour("weights whose data is replaced after fuse", FOLLOWED, "stacks.py"),
    Behaviour("buffers written to or assigned", FOLLOWED, "stacks.py"),
    Behaviour("sparse gradients", REFUSED, "rules/layers.py"),
    Behaviour("embeddings with max_norm and padding", ALONE, "rules/layers.py"),
    # Autograd.
    Behaviour("hooks on weights", FOLLOWED, "stacks.py"),
    Behaviour("hooks after a weight's gradient", REFUSED, check=_hooks_after_gradients),
    Behaviour("hooks on activations and on grad_fn", ALONE, "stacked.py"),
    Behaviour("a tensor's requires_grad, data or grad set in forward", ALONE, "stacked.py"),
    Behaviour("gradients taken in forward", ALONE, "stacked.py"),
    Behaviour("gradients that reach a model's own weights", FOLLOWED, "stacks.py"),
    Behaviour("reentrant checkpoints", ALONE, "stacked.py"),
    Behaviour("other checkpoints", ALL_AT_ONCE, "joined_models.py"),
    Behaviour("saved_tensors_hooks in forward", ALONE, "rules/"),
    Behaviour("autograd.Function", ALL_AT_ONCE, "rules/"),
    Behaviour("no_grad, inference_mode, detach, autocast in forward", ALL_AT_ONCE, "rules/"),
    Behaviour("tensors of other classes in forward", ALONE, "stacked.py"),
    # Optimizers.
    Behaviour("an optimizer's hooks", FOLLOWED, "optimizer.py"),
    Behaviour("an optimizer's step or class of one's own", FOLLOWED, "optimizer.py"),
    Behaviour("an optimizer that has stepped before", FOLLOWED, "optimizer.py"),
    Behaviour("parameter groups added after fuse", FOLLOWED, "optimizer.py"),
    Behaviour("an optimizer that lacks a weight of the others", REFUSED, "optimizer.py"),
    Behaviour("step of a model's own optimizer", REFUSED, "optimizer.py"),
    Behaviour("two steps without zero_grad", REFUSED, "optimizer.py"),
)


# The user's own optimizers: which an array can take, and what they did before or do besides.

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL_OPTIMIZER_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


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
    of_all = [
        hook for kind in _GLOBAL_OPTIMIZER_HOOKS for hook in getattr(torch_optimizer, kind).values()
    ]
    step = vars(optimizer).get("step")
    return (
        any(not isinstance(hook, StepGuard) for hook in own)
        or any(
            not (getattr(one, "__module__", "") or "").startswith("stepscope.") for one in of_all
        )
        or (step is not None and not hasattr(step, "_wrapped_by_lr_sched"))
    )


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
    stacked: dict[str, torch.Tensor] = {}
    for kind in (kind for kind in kinds if kind != "step"):
        values = [state.get(kind) for state in own]
        empty = torch.zeros_like(stack[0])
        if any(one is not None and one.shape != empty.shape for one in values):
            raise UsageError(f"an optimizer's {kind} from before has another shape than its weight")
        stacked[kind] = torch.stack([empty if one is None else one.to(empty) for one in values])
    if kinds:
        steps = [float(state.get("step", 1.0 if state else 0.0)) for state in own]
        stacked["step"] = torch.tensor(steps, dtype=torch.float64, device=stack.device)
    return stacked
