"""Everything that a user can change, by id: one list for findings, `whatif`, `tune` and the docs.

`changes.PIN_MEMORY` is the change with the id pin-memory. Of the other rooms' code nothing is
imported here: see change.py.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from stepscope.changes import (
    communication,
    host,
    kernels,
    loader,
    memory,
    optimizer,
    precision,
    run,
)
from stepscope.changes.change import Application, Change, WhatIf

# A family's changes are applied and listed in its order, families in this one.
_FAMILIES = (precision, kernels, optimizer, loader, host, communication, memory, run)
# What-ifs are listed and tried in this order; others follow.
_PREDICTED_FIRST = (
    *("precision", "optimizer", "compile", "cuda-graphs", "threads", "no-breaks", "no-sync"),
    *("no-data-wait", "loader-workers", "no-stalls", "scan", "batch", "fuse", "accumulate"),
    *("checkpoint", "save-memory", "workers", "hosts", "zero", "bucket-mb", "bandwidth"),
    *("latency", "no-straggler", "consistency", "gpu", "remove", "scale"),
)

CHANGES: dict[str, Change] = {}
PREDICTED: dict[str, WhatIf] = {}  # those that `whatif` predicts
APPLIED: dict[str, Application] = {}  # those that `run --with` and `tune` apply

# The two spellings of one change: what `run --with` says -> what `whatif` says, and back. Both
# verbs take both; what they print is their own. An id without a value means its first value.
WHATIF_OF: dict[str, str] = {"threads=cores": "threads=fit"}
APPLIED_AS: dict[str, str] = {
    "threads=fit": "threads=cores",
    "reduce-overhead": "compile=reduce-overhead",
}
_MOST_NEAR = 3


def register(change: Change) -> None:
    """Add a change to the list. ValueError for an id that is taken."""
    if change.id in CHANGES:
        raise ValueError(f"there is a change {change.id!r} already")
    CHANGES[change.id] = change
    if change.prediction is not None:
        PREDICTED[change.id] = change.prediction
    if change.application is not None:
        APPLIED[change.id] = change.application
    if change.setting:
        WHATIF_OF[change.id] = change.setting
        APPLIED_AS.setdefault(change.setting, change.id)


for _family in _FAMILIES:
    for _change in _family.CHANGES:
        register(_change)
PREDICTED |= {
    name: PREDICTED.pop(name) for name in (*_PREDICTED_FIRST, *PREDICTED) if name in PREDICTED
}


def __getattr__(name: str) -> Change:
    try:
        return CHANGES[name.lower().replace("_", "-")]
    except KeyError:
        raise AttributeError(f"there is no change {name!r}") from None


def did_you_mean(text: str, known: Collection[str]) -> str:
    """Return '; did you mean A or B?', or '' if nothing known is spelled like `text`."""
    parts = set(text.lower().replace("_", "-").replace("=", "-").split("-"))
    alike = [name for name in known if parts & set(name.replace("=", "-").split("-"))]
    near = [*get_close_matches(text, list(known), 2), *alike]
    near = list(dict.fromkeys(near))[:_MOST_NEAR]
    return f"; did you mean {' or '.join(near)}?" if near else ""
