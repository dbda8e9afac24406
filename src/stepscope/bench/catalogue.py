"""Every workload there is: the suite's own files, and those that other packages declare."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from stepscope.bench import workloads
from stepscope.bench.workload import TrainingWorkload
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import EntryPoint

GROUP = "stepscope.workloads"  # entry points of other packages: NAME = "package.module:WORKLOAD"


def names() -> tuple[str, ...]:
    """In order; nothing is imported for it."""
    return (*sorted(_own()), *sorted(_others()))


def load(name: str) -> TrainingWorkload:
    """UsageError for a name that nobody has, or a package that cannot be loaded."""
    if name in _own():
        module = importlib.import_module(f"{workloads.__name__}.{_own()[name]}")
        workload: TrainingWorkload = module.WORKLOAD
        return workload
    others = _others()
    if name not in others:
        raise UsageError(f"there is no workload {name}{_nearest(name, names())}")
    try:
        found = others[name].load()
    except Exception as error:
        raise UsageError(f"workload {name} of {others[name].value}: {error}") from None
    if not isinstance(found, TrainingWorkload):
        raise UsageError(f"{others[name].value} is no stepscope.bench.workload.TrainingWorkload")
    return found


def _own() -> dict[str, str]:
    """Name -> module: a file's name with its underlines as hyphens."""
    found = pkgutil.iter_modules(workloads.__path__)
    return {module.name.replace("_", "-"): module.name for module in found}


def _others() -> dict[str, EntryPoint]:
    own = _own()
    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in own}


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, 3, 0.5)
    return f": did you mean {' or '.join(close)}?" if close else f". There are: {', '.join(known)}"
