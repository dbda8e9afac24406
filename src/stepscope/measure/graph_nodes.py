"""One node of the autograd graph: what it keeps for backward, and what it hands on.

Everything here only reads, and runs none of the script's code.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from stepscope.measure.own_operators import unseen
from stepscope.measure.storages import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator

LEAF = "AccumulateGrad"
_PREFIX = "_saved_"


def node_of(output: Any) -> Any:
    """The node of a tensor or a GradientEdge."""
    return output.grad_fn if isinstance(output, torch.Tensor) else getattr(output, "node", None)


def is_leaf(node: Any) -> bool:
    """Whether it accumulates the gradient of a parameter."""
    return type(node).__name__ == LEAF


def is_parameter(tensor: Any) -> bool:
    """A weight or a view of one, including one that FSDP has gathered."""
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(_PREFIX))


def saved_by(node: Any, notes: set[str]) -> Iterator[tuple[str, Any]]:
    """The tensors a node holds, each with the name of its field."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        fields: tuple[str, ...] = ("saved_tensors", "__dict__")
    else:
        kind: Any = type(node)
        fields = _fields(kind)
        if not fields and "CppNode" in node.name():
            notes.add(f"what the C++ function {node.name()} saved cannot be seen: not counted")
    for name in fields:
        try:
            with unseen():  # it unpacks into a new tensor
                value = getattr(node, name)
        except RuntimeError:  # freed, or changed in place: backward itself will report it
            notes.add(f"a tensor saved by {node.name()} could not be read: not counted")
            continue
        for tensor in tensors_in(value, depth=2):
            yield name.removeprefix(_PREFIX), tensor
