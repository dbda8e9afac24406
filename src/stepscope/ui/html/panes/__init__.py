"""The panes of the report, one file each. Every file here declares a `PANE`."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.ui.html.pane import Pane


@cache
def find_panes() -> tuple[Pane, ...]:
    """All panes, in the order of the page."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    panes: list[Pane] = [import_module(f"{__name__}.{name}").PANE for name in names]
    return tuple(sorted(panes, key=lambda pane: pane.order))
