"""stepscope: where each training step went, what to change, what it buys, and proof."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    "NotCapturedError": "stepscope.errors",
    "StepscopeError": "stepscope.errors",
    "UnreadableInputError": "stepscope.errors",
    "UsageError": "stepscope.errors",
    "compare": "stepscope.ui.api",
    "explain_job": "stepscope.explain.explain_job",
    "explain_rank": "stepscope.explain.rank",
    "explain_together": "stepscope.explain.explain_job",
    "load_ipython_extension": "stepscope.ui.notebook_magic",
    "read_trace": "stepscope.trace.read",
    "region": "stepscope.measure.watch",
    "unload_ipython_extension": "stepscope.ui.notebook_magic",
    "watch": "stepscope.measure.watch",
    "whatif": "stepscope.ui.api",
    "write_report": "stepscope.ui.api",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that importing stepscope costs nothing."""
    if name in ("explain", "fix"):  # rooms; that of `explain` can be called
        return import_module(f"stepscope.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'stepscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
