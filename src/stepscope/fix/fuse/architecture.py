"""Whether models are of one architecture, which settings each has of its own, and the template
whose code computes for all."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stepscope.errors import UsageError
from stepscope.fix.fuse.rules.dropout import PerModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_SETTINGS = (bool, int, float, str, tuple, type(None))


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
        for (path, a), (_, b) in zip(models[0].named_modules(), model.named_modules(), strict=True):
            if type(a) is not type(b):
                kinds = f"{type(b).__name__}, not {type(a).__name__}"
                raise UsageError(f"model {number} is not built like model 0: {path} is a {kinds}")


def describe(model: nn.Module) -> tuple[Any, ...]:
    """Equal for models that can be in one array."""
    kinds = tuple((path, type(module)) for path, module in model.named_modules())
    return kinds, tuple(_tensors(model).items())


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


def differing_settings(
    models: Sequence[nn.Module],
) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Module, attribute and every model's value, where they differ."""
    for path, module in models[0].named_modules():
        others = [model.get_submodule(path) for model in models]
        for name, value in vars(module).items():
            if name.startswith("_") or not isinstance(value, _SETTINGS):
                continue
            values = tuple(getattr(other, name, None) for other in others)
            if any(one != value for one in values):
                yield path, name, values


def settle(template: nn.Module, models: Sequence[nn.Module]) -> dict[str, str]:
    """Give the template what differs from model to model: dropout's share as a PerModel. Returns
    the modules that must compute one by one, and why."""
    alone: dict[str, str] = {}
    for path, name, values in differing_settings(models):
        module = template.get_submodule(path)
        if isinstance(module, _DROPOUTS) and name == "p":
            module.p = PerModel(values)
        elif name != "training":
            alone[path] = f"{name} differs from model to model"
    return alone


def loose_tensors(model: nn.Module) -> list[str]:
    """Attributes that hold a tensor which is neither parameter nor buffer: all models share it."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]


def check_lengths(count: int, **given: Sequence[Any]) -> None:
    """UsageError unless each is empty or has one value for each model."""
    for name, values in given.items():
        if values and len(values) != count:
            raise UsageError(f"{len(values)} {name} for {count} models: give one for each")


def make_template(model: nn.Module) -> nn.Module:
    """The model's code and settings without its tensors, which come from the stacks."""
    with torch.no_grad():
        memo = {id(one): one for one in (*model.parameters(), *model.buffers())}
        return copy.deepcopy(model, memo)


def refresh_flat_weights(module: nn.Module) -> None:
    """Recurrent modules keep a list of their weights beside the weights themselves."""
    if isinstance(module, nn.RNNBase):
        names = module._flat_weights_names
        module._flat_weights = [module._parameters.get(name) for name in names]


def leave_stacks(model: nn.Module) -> None:
    """Give a model tensors of its own."""
    for one in (*model.parameters(), *model.buffers()):
        one.data = one.data.clone()
