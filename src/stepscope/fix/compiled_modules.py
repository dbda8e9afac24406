"""Which modules are compiled, and those that module.compile() would compile nothing of."""

from __future__ import annotations

from typing import Any


def torchs_forward(root: Any) -> str | None:
    """The path of such a module, "" if it is the root itself; None if the forward is the user's.

    torch.compile starts with the first frame that is not torch's. For nn.Sequential there is none,
    unless its forward is compiled itself. DDP calls the module inside it.
    """
    is_wrapper = type(root).__name__ == "DistributedDataParallel"
    inner = root.module if is_wrapper else root
    defined_in = getattr(type(inner).forward, "__module__", None) or ""
    if not defined_in.startswith("torch.nn"):
        return None
    return "module" if is_wrapper else ""


def is_compiled(module: Any) -> bool:
    """By torch.compile(module), module.compile() or a forward that was compiled."""
    forward = vars(module).get("forward")
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or (
            hasattr(forward, "_torchdynamo_orig_callable")
            and not getattr(forward, "_torchdynamo_disable", False)
        )
    )
