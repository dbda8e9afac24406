"""Describe a model's modules: the blocks it repeats, and which parts are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# The blocks of a model: modules of one type in one list, of which it is mostly made.

_FEWEST = 3


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """Where they are, and the modules themselves."""

    path: str  # of the list, seen from the model, such as encoder.layers
    type: str
    modules: tuple[Any, ...]

    @property
    def update_statistics(self) -> bool:
        """Whether a second forward would count a batch twice, as batch normalisation does."""
        return any(
            getattr(part, "track_running_stats", False)
            for block in self.modules
            for part in block.modules()
        )


def find_blocks(model: Any) -> RepeatedBlocks | None:
    """The type of composed module that stands several times in one list and holds the most
    parameters; of equals the outer ones."""
    best: tuple[int, RepeatedBlocks] | None = None
    for path, holder in model.named_modules():
        for name in {type(child).__name__: None for child in holder.children()}:
            blocks = tuple(c for c in holder.children() if type(c).__name__ == name)
            is_composed = any(True for block in blocks for _ in block.children())
            if len(blocks) < _FEWEST or not is_composed:
                continue
            held = sum(p.numel() for block in blocks for p in block.parameters())
            if best is None or held > best[0]:
                best = (held, RepeatedBlocks(path, name, blocks))
    return None if best is None else best[1]


def checkpoint_switch(model: Any) -> str | None:
    """The path of the first module that can checkpoint itself; "" is the model."""
    for path, module in model.named_modules():
        if hasattr(module, "gradient_checkpointing_enable") and getattr(
            module, "supports_gradient_checkpointing", True
        ):
            return str(path)
    return None


# Which modules are compiled, and those that module.compile() would compile nothing of.


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
