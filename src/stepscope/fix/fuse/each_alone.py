"""A module that cannot compute for all models at once, computed by each model's own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from stepscope.fix.fuse.new_tensors import as_drawn_alone
from stepscope.fix.fuse.rules import stack_results
from stepscope.fix.fuse.stacked import NotFusableError, Stacked, is_final, of_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
    reached: set[tuple[int, int]],
) -> Any:
    """The results of all models' modules of this path, stacked. Backward notes in `reached` which
    models' weights get a gradient: the stack's id and the model."""
    _check_arguments((args, kwargs))
    results = []
    for number, model in enumerate(models):
        module = model.get_submodule(path)
        own_args, own_kwargs = tree_map(partial(of_model, number), (args, kwargs))
        tensors = _own_tensors(module, template.get_submodule(path), number, reached)
        given = dict(tensors)
        with streams.of(number), as_drawn_alone():
            try:
                result = torch.func.functional_call(module, tensors, own_args, own_kwargs)
            except NotFusableError:
                raise
            except Exception as error:
                vars(error)[_OWN] = True
                raise
            results.append(result)
        for name, value in tensors.items():  # a buffer that the code replaced
            if value is not given[name]:
                given[name].detach().copy_(value.detach())
    return stack_results(results, apart=not path)


def may_compute_alone(error: Exception) -> bool:
    """Whether each model may succeed where all at once did not."""
    return not is_final(error) and _OWN not in vars(error)


def reason_of(error: Exception) -> str:
    if isinstance(error, NotFusableError):
        return str(error)
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}"


def left_out(
    stacks: dict[str, torch.Tensor],
    by_path: dict[str, torch.Tensor],
    alone: Iterable[str],
    reached: set[tuple[int, int]],
) -> dict[str, list[bool]]:
    """Stacks of which backward reached some models' weights and not others': True where not. All
    modules that hold such a stack compute alone."""
    found: dict[str, list[bool]] = {}
    roots = tuple(f"{path}." if path else "" for path in alone)
    if not roots:
        return found
    for name, stack in stacks.items():
        paths = [path for path, one in by_path.items() if one is stack]
        if stack.grad is not None and all(path.startswith(roots) for path in paths):
            missing = [(id(stack), model) not in reached for model in range(stack.shape[0])]
            if any(missing) and not all(missing):
                found[name] = missing
    return found


def _check_arguments(arguments: Any) -> None:
    """An object whose tensors cannot be taken apart goes to no model."""
    for value in tree_leaves(arguments):
        held = getattr(value, "__dict__", {})
        if not isinstance(value, Stacked) and any(
            isinstance(one, Stacked) for one in tree_leaves(held)
        ):
            raise NotFusableError(f"a {type(value).__name__} holds tensors of all models")


def _own_tensors(
    module: nn.Module, template: nn.Module, number: int, reached: set[tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Slices of the stacks, so that gradients reach them."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    slices = {}
    for name in names:
        owner, _, last = name.rpartition(".")
        place = template.get_submodule(owner)
        held = place._parameters.get(last)
        stacked: Any = held if held is not None else place._buffers[last]
        slices[name] = own = stacked.physical[number]
        if own.requires_grad:
            own.register_hook(partial(_note_gradient, reached, (id(stacked.physical), number)))
    return slices


def _note_gradient(
    reached: set[tuple[int, int]], weight: tuple[int, int], _gradient: torch.Tensor
) -> None:
    reached.add(weight)
