"""Modules whose forward is torch's own: module.compile() would compile nothing of them."""

from __future__ import annotations

from typing import Any


def torchs_forward(root: Any) -> str | None:
    """The path of such a module, "" if it is the root itself; None if the forward is the user's.

    torch.compile starts with the first frame that is not torch's. For nn.Sequential there is none,
    unless its forward is compiled itself. DDP calls the module inside it.
    """
    is_wrapper = type(root).__name__ == "DistributedDataParallel"
    inner = root.module if is_wrapper else root
    is_torchs = str(type(inner).forward.__module__).startswith("torch.nn")
    if not is_torchs:
        return None
    return "module" if is_wrapper else ""
