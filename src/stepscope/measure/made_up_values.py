"""Values that a script reads from fake tensors, which have none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

NOT_READ: Final = object()  # the operator reads no value
_ANSWERS = {"aten::equal": True, "aten::is_nonzero": False}


def made_up_value(operator: str, tensors: Sequence[Any]) -> Any:
    """No test holds, and every number is one: optimizers divide by what they count."""
    if operator != "aten::_local_scalar_dense":
        return _ANSWERS.get(operator, NOT_READ)
    dtype = tensors[0].dtype
    if str(dtype) == "torch.bool":
        return False
    return 1.0 if dtype.is_floating_point else 1


def values_of_fakes() -> Any:
    """A mode in which fake tensors can be read, and real ones are what they are."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class MadeUpValues(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            fakes = [one for one in args if isinstance(one, FakeTensor)]
            value = made_up_value(func._schema.name, fakes) if fakes else NOT_READ
            return func(*args, **(kwargs or {})) if value is NOT_READ else value

    return MadeUpValues()
