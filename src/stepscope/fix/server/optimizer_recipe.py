"""An optimizer as it can be built again, on other processes, for some of the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# They belong to the device that the worker computes on.
_WORKER_ONLY = {"capturable": False, "fused": None, "foreach": None, "differentiable": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerRecipe:
    """`groups` holds the settings of each parameter group, `names` the parameters in it."""

    kind: type
    groups: tuple[dict[str, Any], ...]
    names: tuple[tuple[str, ...], ...]

    def build(self, parameters: Mapping[str, Any]) -> tuple[Any, dict[int, int]]:
        """The optimizer of these parameters (None if it trains none of them), and the place of
        each group of the recipe in it."""
        groups: list[dict[str, Any]] = []
        places: dict[int, int] = {}
        for index, (settings, names) in enumerate(zip(self.groups, self.names, strict=True)):
            here = [parameters[name] for name in names if name in parameters]
            if here:
                places[index] = len(groups)
                groups.append({**settings, "params": here})
        return (self.kind(groups, **_required(groups[0])), places) if groups else (None, {})


def _required(group: dict[str, Any]) -> dict[str, Any]:
    """Optimizers check their defaults even where every group has its own."""
    return {"lr": group["lr"]} if "lr" in group else {}


def make_recipe(
    optimizer: Any | Callable[[Sequence[Any]], Any], parameters: Mapping[str, Any]
) -> OptimizerRecipe:
    """From an optimizer of these parameters, or from a function that makes one of a list."""
    trained = {name: one for name, one in parameters.items() if one.requires_grad}
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise UsageError(
                f"optimizer={optimizer!r}: give a torch optimizer of the model's parameters, or a "
                "function that makes one from a list of parameters"
            )
        optimizer = optimizer(list(trained.values()))
    by_id = {id(one): name for name, one in parameters.items()}
    names = []
    for group in optimizer.param_groups:
        unknown = [one for one in group["params"] if id(one) not in by_id]
        if unknown:
            raise UsageError(
                f"{type(optimizer).__name__} trains {len(unknown)} tensors that are not "
                "parameters of the model given to the server. Build it from that model's "
                "parameters"
            )
        names.append(tuple(by_id[id(one)] for one in group["params"]))
    return OptimizerRecipe(
        kind=type(optimizer),
        groups=tuple({**group, **_worker_only(group)} for group in group_settings(optimizer)),
        names=tuple(names),
    )


def group_settings(optimizer: Any) -> tuple[dict[str, Any], ...]:
    """The numbers of each parameter group as they are now: a schedule changes them."""
    return tuple(
        {
            name: value.item() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name not in ("params", "param_names", "initial_lr")
        }
        for group in optimizer.param_groups
    )


def set_groups(
    optimizer: Any, places: Mapping[int, int], settings: Sequence[Mapping[str, Any]]
) -> None:
    """Use these numbers from now on."""
    for index, place in places.items():
        group = optimizer.param_groups[place]
        group.update(
            {name: value for name, value in settings[index].items() if name not in _WORKER_ONLY}
        )


def _worker_only(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in _WORKER_ONLY.items() if name in group}
