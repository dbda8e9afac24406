"""An account of memory on CPUs, where torch keeps none: what is alive after each operator."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[misc]
    """Counts while it is active; `peak_bytes` since it was last reset."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in tensors:
            self._add(tensor)

    def bytes_now(self) -> int:
        self._alive = {k: one for k, one in self._alive.items() if not one[0].expired()}
        return sum(size_bytes for _, size_bytes in self._alive.values())

    def reset_peak(self) -> None:
        self.peak_bytes = self.bytes_now()

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        if known is None or known[0].expired():
            self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self._add(one)
        self.peak_bytes = max(self.peak_bytes, self.bytes_now())
        return result
