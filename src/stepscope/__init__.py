"""stepscope: where each training step went, what to change, what it buys, and proof."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing's own takes 10 ms to import
if TYPE_CHECKING:
    from typing import Any

    from stepscope import fix as fix
    from stepscope.errors import (
        NotCapturedError,
        StepscopeError,
        UnreadableInputError,
        UsageError,
    )
    from stepscope.explain.explain_job import explain_job, explain_together
    from stepscope.explain.rank import explain_rank
    from stepscope.measure.watch import region, watch
    from stepscope.trace.read import read_trace
    from stepscope.ui.api import compare, explain, whatif, write_report

__version__ = "0.2.0"

__all__ = [
    "NotCapturedError",
    "StepscopeError",
    "UnreadableInputError",
    "UsageError",
    "__version__",
    "compare",
    "explain",
    "explain_job",
    "explain_rank",
    "explain_together",
    "fix",
    "read_trace",
    "region",
    "watch",
    "whatif",
    "write_report",
]

_HOME = {
    "errors": ("NotCapturedError", "StepscopeError", "UnreadableInputError", "UsageError"),
    "explain.explain_job": ("explain_job", "explain_together"),
    "explain.rank": ("explain_rank",),
    "measure.watch": ("region", "watch"),
    "trace.read": ("read_trace",),
    "ui.api": ("compare", "whatif", "write_report"),
    "ui.notebook_magic": ("load_ipython_extension", "unload_ipython_extension"),
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that importing stepscope costs nothing."""
    if name in ("explain", "fix"):  # rooms; that of `explain` can be called
        return import_module(f"stepscope.{name}")
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"stepscope.{module}"), name)
    raise AttributeError(f"module 'stepscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
