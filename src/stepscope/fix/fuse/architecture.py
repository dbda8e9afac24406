"""Whether models are of one architecture, and the template whose code computes for all."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from stepscope.errors import UsageError
from stepscope.fix.fuse.stacked import Stacked

if TYPE_CHECKING:
    from collections.abc import Sequence


def check_alike(models: Sequence[nn.Module]) -> None:
    """UsageError with the first difference."""
    if not models:
        raise UsageError("fuse needs at least one model")
    if len({id(model) for model in models}) < len(models):
        raise UsageError("fuse needs models of their own: one is given twice")
    first = _tensors(models[0])
    for number, model in enumerate(models[1:], 1):
        other = _tensors(model)
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                here, there = (_words(one.get(name)) for one in (first, other))
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
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {
        name: (tuple(one.shape), one.dtype, one.device, one.requires_grad) for name, one in every
    }


def _words(facts: tuple[Any, ...] | None) -> str:
    if facts is None:
        return "missing"
    shape, dtype, device, _ = facts
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {device}"


def check_lengths(count: int, **given: Sequence[Any]) -> None:
    """UsageError unless each is empty or has one value for each model."""
    for name, values in given.items():
        if values and len(values) != count:
            raise UsageError(f"{len(values)} {name} for {count} models: give one for each")


def place_of(model: int, count: int) -> int:
    """UsageError unless there is such a model; from the end, if it is negative."""
    if not -count <= model < count:
        raise UsageError(f"there is no model {model}: this array has {count}")
    return model % count


def make_template(model: nn.Module) -> nn.Module:
    """The model's code and settings without its tensors, which come from the stacks."""
    with torch.no_grad():
        loose = (value for module in model.modules() for value in vars(module).values())
        kept = (one for one in loose if isinstance(one, torch.Tensor))
        memo = {id(one): one for one in (*model.parameters(), *model.buffers(), *kept)}
        return copy.deepcopy(model, memo)


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


def keep_replaced_buffers(buffers: Sequence[tuple[dict[str, Any], str, Stacked]]) -> None:
    """Where the template's code assigned to a buffer, its values go to the models' own."""
    for held, name, stacked in buffers:
        new = held[name]
        if new is stacked:
            continue
        held[name] = stacked
        if isinstance(new, torch.Tensor):
            values = new.front() if isinstance(new, Stacked) else new
            with torch.no_grad():
                stacked.physical.copy_(values)
