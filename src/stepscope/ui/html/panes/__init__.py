"""The panes of the report, one file each. A file that declares a `PANE` is found here by itself."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.ui.html.pane import Pane


@cache
def find_panes() -> tuple[Pane, ...]:
    """In the order in which they stand."""
    modules = (
        import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)
    )
    panes: list[Pane] = [module.PANE for module in modules]
    return tuple(sorted(panes, key=lambda pane: pane.order))
