"""NVTX ranges for people who run Nsight around us: phases and modules. NCCL marks its own calls."""

from __future__ import annotations

import sys
from typing import Any

from stepscope.measure.never_raise import never_raise


class Ranges:
    """Pushes and pops; does nothing where torch has no CUDA."""

    def __init__(self) -> None:
        self._nvtx: Any = None
        self._open = 0

    @never_raise
    def push(self, name: str) -> None:
        nvtx = self._find()
        if nvtx is not None:
            nvtx.range_push(f"stepscope: {name}")
            self._open += 1

    @never_raise
    def pop(self) -> None:
        if self._open:
            self._open -= 1
            self._nvtx.range_pop()

    def _find(self) -> Any:
        if self._nvtx is None:
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_available():
                self._nvtx = torch.cuda.nvtx
        return self._nvtx
