"""ReLU's backward straight from bits: the output that backward asks for is never written out."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from stepscope.fix.saved.encodings.device_kernels import kernels_for


class ReluOutputFromBits(torch.Tensor):  # type: ignore[misc]
    """Looks like a ReLU's output. `threshold_backward` reads the bits; anything else gets a plain
    tensor of ones and zeros."""

    packed: torch.Tensor

    @staticmethod
    def __new__(cls, packed: torch.Tensor, shape: Any, stride: Any, dtype: torch.dtype) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, dtype=dtype, device=packed.device
        )
        made.packed = packed
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def decoded(self) -> torch.Tensor:
        kernels = kernels_for(self.packed, "bit_kernels")
        plain: torch.Tensor = kernels.unpack(self.packed, self.numel(), width=1, dtype=self.dtype)
        return plain.as_strided(self.shape, self.stride())

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func is torch.ops.aten.threshold_backward.default and _fits(*args[:3]):
            gradient, output = args[0], args[1]
            return kernels_for(gradient, "bit_kernels").relu_backward(gradient, output.packed)
        if func is torch.ops.aten.detach.default:
            self = args[0]
            return cls(self.packed, self.shape, self.stride(), self.dtype)

        def plain(value: Any) -> Any:
            return value.decoded() if isinstance(value, cls) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def _fits(gradient: Any, output: Any, threshold: Any) -> bool:
    return (
        type(gradient) is torch.Tensor
        and isinstance(output, ReluOutputFromBits)
        and threshold == 0
        and gradient.dtype == output.dtype
        and gradient.shape == output.shape
        and gradient.stride() == output.stride()
    )
