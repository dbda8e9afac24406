"""Steps as columns, written by hand in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stepscope.records.rank import ALL_PHASES, StepColumns

MS = 1_000_000


def ns(values: Sequence[float]) -> np.ndarray:
    return np.round(np.asarray(values, float) * MS).astype(np.int64)


def columns(
    wall_ms: Sequence[float],
    *,
    starts_ms: float = 0.0,
    window: Sequence[int] = (),
    first: bool = False,
    ours_ms: float = 0.0,
    **others: Any,
) -> StepColumns:
    """Steps one after the other; `ours_ms` lies before each step of a window. `others` are phases
    or other columns, in milliseconds where their name ends in _ns."""
    wall = ns(wall_ms)
    windows = np.isin(np.arange(len(wall)), list(window))
    phases = {name: ns(v) for name, v in others.items() if name in ALL_PHASES}
    extra = {
        name: ns(v) if name.endswith("_ns") else np.asarray(v, np.int64)
        for name, v in others.items()
        if name not in phases
    }
    rest = wall - sum(phases.values(), np.zeros(len(wall), np.int64))
    phases["forward"] = phases.get("forward", 0) + rest
    whole = np.ones(len(wall), np.bool_)
    whole[0] = not first
    gaps = np.where(windows, round(ours_ms * MS), 0)
    return StepColumns(
        number=np.arange(len(wall)),
        wall_ns=wall,
        end_unix_ns=round(starts_ms * MS) + np.cumsum(wall + gaps),
        phases_ns=phases,
        window=windows,
        memory=np.zeros(len(wall), np.bool_),
        whole=whole,
        **extra,
    )
