"""Which bytes a training holds at each moment, from the storages that its operators make.

Real tensors and fake ones (shapes without memory) are counted alike.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.bench.operator_needs import MeasuredNeeds

_CUDA_BLOCK = 512  # bytes: the CUDA allocator hands out multiples


class MemoryLedger(TorchDispatchMode):
    """Counts the storages on one kind of device that are made while it is entered, until they are
    freed."""

    def __init__(self, kind: str, needs: MeasuredNeeds | None = None) -> None:
        super().__init__()
        self.held_bytes = 0
        self.peak_bytes = 0
        self._kind = kind
        self._block = _CUDA_BLOCK if kind == "cuda" else 1
        self._needs = needs
        self._sizes: dict[int, int] = {}  # of living storages
        self._reads_zero = False

    @contextmanager
    def values_read_as_zero(self) -> Iterator[None]:
        """For code that reads a fake tensor's value, such as a check in an initialisation."""
        self._reads_zero = True
        try:
            yield
        finally:
            self._reads_zero = False

    def __torch_dispatch__(
        self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Before the call: it may change its arguments' shapes.
        needs = self._needs.of(operator, args, kwargs) if self._needs else None
        try:
            results = operator(*args, **kwargs)
        except DataDependentOutputException:
            if not self._reads_zero or operator is not torch.ops.aten._local_scalar_dense.default:
                raise
            return _zero(args[0].dtype)
        tensors = [value for value in tree_leaves(results) if isinstance(value, torch.Tensor)]
        sizes = [0] * len(tensors)
        if needs and self._needs and len(needs.results) == len(tensors):
            self._needs.returned(tensors, needs)
            sizes = [real.storage_bytes for real in needs.results]
        for tensor, least in zip(tensors, sizes, strict=True):
            if tensor.device.type == self._kind:
                self._count(tensor, least)
        beside = needs.beside_bytes if needs else 0
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + beside)
        return results

    def _count(self, tensor: torch.Tensor, at_least: int) -> None:
        """A storage that was resized counts with its new size."""
        parts: tuple[torch.Tensor, ...] = (tensor,)
        if tensor.layout == torch.sparse_coo:
            parts = (tensor._indices(), tensor._values())
        for part in parts:
            storage = part.untyped_storage()
            size = max(storage.nbytes(), at_least)
            size = -(-size // self._block) * self._block
            key = storage._cdata
            before = self._sizes.get(key)
            if before is None:
                weakref.finalize(storage, self._free, key)
            self._sizes[key] = max(size, before or 0)
            self.held_bytes += self._sizes[key] - (before or 0)

    def _free(self, key: int) -> None:
        self.held_bytes -= self._sizes.pop(key)


def _zero(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0
