"""Our own work on tensors, out of sight of the script's modes: a counter of FLOPs, a log."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Inside, operators go to no TorchDispatchMode and no TorchFunctionMode."""
    torch: Any = sys.modules["torch"]
    if not torch._C._len_torch_dispatch_stack() and not torch._C._len_torch_function_stack():
        yield
        return
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
