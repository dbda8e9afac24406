"""What could be changed, one file a what-if; a what-if's name is its file's.

Each file has `HELP` and `apply(context, value) -> Outcome`, which raises Refused where there is
nothing to change or the trace does not tell enough. A file is imported when it is asked for.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.predict.outcome import Outcome
    from stepscope.predict.step_context import StepContext

    Apply = Callable[[StepContext, str], Outcome]
    HELP: dict[str, str]

_NAMES = (
    "precision",
    "optimizer",
    "cuda-graphs",
    "compile",
    "threads",
    "batch",
    "accumulate",
    "checkpoint",
    "no-sync",
    "no-data-wait",
    "remove",
    "scale",
    "workers",
    "zero",
    "bucket-mb",
    "bandwidth",
    "latency",
    "no-straggler",
)


def _file(name: str) -> Any:
    return import_module(f"{__name__}.{name.replace('-', '_')}")


def _apply(name: str, context: StepContext, value: str) -> Outcome:
    outcome: Outcome = _file(name).apply(context, value)
    return outcome


WHATIFS: dict[str, Apply] = {name: partial(_apply, name) for name in _NAMES}
WITHOUT_VALUE = frozenset(("compile", "cuda-graphs", "no-sync", "no-data-wait", "no-straggler"))


def __getattr__(name: str) -> Any:
    if name != "HELP":
        raise AttributeError(name)
    return {each: _file(each).HELP for each in _NAMES}
