"""Whether models are of one architecture, and the template whose code computes for all."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from stepscope.errors import UsageError
from stepscope.fix.fuse.behaviours import own_hooks
from stepscope.fix.fuse.differences import NOT_SETTINGS
from stepscope.fix.fuse.known_values import contents_of
from stepscope.fix.fuse.stacked import Stacked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def check_given(models: Sequence[nn.Module]) -> None:
    """UsageError if there are none, or one is there twice."""
    if not models:
        raise UsageError("fuse needs at least one model")
    if len({id(model) for model in models}) < len(models):
        raise UsageError("fuse needs distinct models, but one is given twice")


def check_alike(models: Sequence[nn.Module]) -> None:
    """UsageError with the first difference."""
    first = _tensors(models[0])
    for number, model in enumerate(models[1:], 1):
        other = _tensors(model)
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                here, there = (_words(name, one.get(name)) for one in (first, other))
                raise UsageError(
                    f"model {number} is not built like model 0: {name} is {there}, not {here}"
                )
        kinds, others = _kinds(models[0]), _kinds(model)
        for path in {**kinds, **others}:
            if kinds.get(path) is not others.get(path):
                here, there = (_kind_words(one.get(path)) for one in (kinds, others))
                raise UsageError(
                    f"model {number} is not built like model 0: "
                    f"{path or 'it'} is {there}, not {here}"
                )


def describe(model: nn.Module) -> tuple[Any, ...]:
    """Equal for models that can be in one array."""
    return tuple(_kinds(model).items()), tuple(_tensors(model).items())


def _kinds(model: nn.Module) -> dict[str, type]:
    """Classes by path; a parametrization makes a class for every module, which says nothing."""
    return {path: type_before_parametrizations(module) for path, module in model.named_modules()}


def _kind_words(kind: type | None) -> str:
    return "missing" if kind is None else f"a {kind.__name__}"


def _tensors(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """By name: what must be the same in all models, and which earlier name is the same tensor."""
    first: dict[int, str] = {}
    found: dict[str, tuple[Any, ...]] = {}
    for kind in (model.named_parameters, model.named_buffers):
        for name, one in kind(remove_duplicate=False):
            tied = first.setdefault(id(one), name)
            found[name] = (tuple(one.shape), one.dtype, one.device, one.requires_grad, tied)
    return found


def _words(name: str, facts: tuple[Any, ...] | None) -> str:
    if facts is None:
        return "missing"
    shape, dtype, device, trains, tied = facts
    trained = "trained" if trains else "not trained (requires_grad=False)"
    tie = "" if tied == name else f", tied to {tied}"
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {device}, {trained}{tie}"


def check_lengths(count: int, **given: Sequence[Any]) -> None:
    """UsageError unless each is empty or has one value for each model."""
    for name, values in given.items():
        if values and len(values) != count:
            raise UsageError(f"{len(values)} {name} for {count} models: give one for each")


def place_of(model: int, count: int) -> int:
    """UsageError unless there is such a model; from the end, if it is negative."""
    if not -count <= model < count:
        raise UsageError(f"there is no model {model}: {count} models are fused")
    return model % count


def make_template(model: nn.Module, knows: Callable[[Any], bool]) -> nn.Module:
    """The model's code and settings without its tensors, which come from the stacks, without what
    cannot be copied, and without hooks, which each model's own modules call."""
    memo: dict[int, Any] = {id(one): one for one in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for name, value in vars(module).items():
            if name.endswith("_hooks") and name in NOT_SETTINGS:
                kept = {} if own_hooks(module) else value
                memo[id(value)] = type(value)(kept) if value is not None else None
            elif name not in NOT_SETTINGS and not knows(value):
                memo[id(value)] = value
            else:
                memo |= {id(one): one for one in contents_of(value, torch.Tensor)}
    with torch.no_grad():
        template = copy.deepcopy(model, memo)
    for module in template.modules():
        own: Any = vars(module).get("forward")
        if own is not None and getattr(own, "__self__", None) is not module:
            del module.forward  # that module computes alone
    return template


def refresh_kept_tensors(module: nn.Module) -> None:
    """What a template's module keeps beside its parameters and buffers: tensors that its code made,
    equal for all models, and in recurrent modules a list of the weights."""
    for name, value in vars(module).items():
        if isinstance(value, Stacked) and value.common is not None:
            vars(module)[name] = value.common
    if isinstance(module, nn.RNNBase):
        vars(module)["flatten_parameters"] = lambda: None  # cuDNN would want one model's memory
        names = module._flat_weights_names
        module._flat_weights = [module._parameters.get(name) for name in names]


def leave_stacks(model: nn.Module) -> None:
    """Give a model tensors of its own."""
    for one in (*model.parameters(), *model.buffers()):
        one.data = one.data.clone()


def put_windows(own: Sequence[torch.Tensor], stack: torch.Tensor) -> None:
    """Each model's tensor becomes a window, which counts its own changes as it would alone."""
    for one, window in zip(own, stack.detach().unbind(0), strict=True):
        one.data = window
