"""A few lines of PyTorch, recorded with shapes and read back as costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope import read_trace
from stepscope.explain.flops.costs import Costs, count_costs
from stepscope.records.trace import Trace
from stepscope.step.phases import PHASES

torch = pytest.importorskip("torch", reason="records a real trace")


def record(path: Path, run: Callable[[], Any]) -> tuple[Trace, Costs]:
    """What the profiler writes about `run`, on the CPU."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, acc_events=True
    ) as profile:
        run()
    profile.export_chrome_trace(str(path))
    trace = read_trace(path, cache=False)
    return trace, count_costs(trace)


def flops_of(costs: Costs, phase: str | None = None) -> int:
    """Counted FLOPs, of one phase or of all."""
    rows = costs.counted
    if phase is not None:
        rows = rows & (costs.phase == PHASES.index(phase))
    return int(costs.flops[rows].sum())


def counted_names(trace: Trace, costs: Costs) -> set[str]:
    """Operators whose FLOPs count."""
    return {trace.strings[code] for code in np.unique(trace.host.name[costs.counted]).tolist()}
