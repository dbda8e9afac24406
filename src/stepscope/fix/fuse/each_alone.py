"""A module that cannot compute for all models at once, computed by each model's own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from stepscope.fix.fuse.new_tensors import as_drawn_alone
from stepscope.fix.fuse.rules import stack_results
from stepscope.fix.fuse.stacked import NotFusableError, Stacked, is_final, is_ordinary, of_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from stepscope.fix.fuse.model_streams import Streams

_OWN = "_raised_by_one_model"  # an error of the model's code itself


def compute_alone(
    models: Sequence[nn.Module],
    template: nn.Module,
    streams: Streams,
    path: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The results of all models' modules of this path, stacked. Their weights are leaves with
    hooks of their own, whose gradients gradients.py adds to the stacks'."""
    _check_arguments((args, kwargs))
    placed = template.get_submodule(path)
    recorded = any(
        isinstance(one, Stacked) and not is_ordinary(one.physical)
        for module in placed.modules()
        for one in (*module._parameters.values(), *module._buffers.values())
    )
    results = []
    for number, model in enumerate(models):
        module = model.get_submodule(path)
        own_args, own_kwargs = tree_map(partial(of_model, number), (args, kwargs))
        with streams.of(number), as_drawn_alone():
            try:
                if recorded:  # a compiler follows no weights but the stacks
                    tensors = _own_tensors(module, placed, number)
                    result = torch.func.functional_call(module, tensors, own_args, own_kwargs)
                else:
                    result = module(*own_args, **own_kwargs)
            except NotFusableError:
                raise
            except Exception as error:
                vars(error)[_OWN] = True
                raise
            results.append(result)
    return stack_results(results, apart=not path)


def may_compute_alone(error: Exception) -> bool:
    """Whether each model may succeed where all at once did not."""
    return not is_final(error) and _OWN not in vars(error)


def reason_of(error: Exception) -> str:
    if isinstance(error, NotFusableError):
        return str(error)
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}"


def _check_arguments(arguments: Any) -> None:
    """An object whose tensors cannot be taken apart goes to no model."""
    for value in tree_leaves(arguments):
        held = getattr(value, "__dict__", {})
        if not isinstance(value, Stacked) and any(
            isinstance(one, Stacked) for one in tree_leaves(held)
        ):
            raise NotFusableError(f"a {type(value).__name__} holds tensors of all models")


def _own_tensors(module: nn.Module, template: nn.Module, number: int) -> dict[str, torch.Tensor]:
    """Slices of the stacks, so that gradients reach them."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    slices = {}
    for name in names:
        owner, _, last = name.rpartition(".")
        place = template.get_submodule(owner)
        held = place._parameters.get(last)
        stacked: Any = held if held is not None else place._buffers[last]
        slices[name] = stacked.physical[number]
    return slices
