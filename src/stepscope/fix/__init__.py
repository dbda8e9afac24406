"""Remedies for use inside the training process: what is advised can be applied.

stepscope.fix.apply("fused-optimizer", "loader-workers=4")   # before the script builds anything

`stepscope run --with ID` and `stepscope tune` do the same without touching the script. remedies/
holds one file per remedy; declaration.py says what each declares about itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.fix.begin import apply as apply
    from stepscope.fix.saved import save_memory as save_memory


def __getattr__(name: str) -> Any:
    """Importing the room costs nothing."""
    if name == "apply":
        from stepscope.fix.begin import apply

        return apply
    if name == "save_memory":
        from stepscope.fix.saved import save_memory

        return save_memory
    raise AttributeError(f"module 'stepscope.fix' has no attribute {name!r}")
