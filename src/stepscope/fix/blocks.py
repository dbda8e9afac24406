"""The blocks of a model: modules of one type in one list, of which it is mostly made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
