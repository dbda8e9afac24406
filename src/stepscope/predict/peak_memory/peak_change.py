"""The peak of a changed step: what was measured, moved by what the backward graph says.

The measured peak of the passes has parts that the graph does not show, mostly workspaces. They
belong to the operator that ran at the peak, and stay with it (passes_peak.py). The optimizer's step
is a second candidate for the peak.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from stepscope.explain.memory.batch import peak_at
from stepscope.predict.peak_memory.grown_peak import later_peak
from stepscope.predict.peak_memory.passes_peak import passes_then
from stepscope.records.prediction import PeakMemory

if TYPE_CHECKING:
    from stepscope.predict.peak_memory.graph_levels import GraphLevels
    from stepscope.predict.peak_memory.held_values import MemoryChange
    from stepscope.records.memory import BatchLine, CapturedCategories, CapturedMemory, Memory

# Relative doubts: of what a change moves, and of the whole.
_MOVED, _WHOLE = 0.06, 0.01
# A compiler keeps less than eager code: between what products return and all of it. GPT-2 small in
# bf16 on an H200 kept this share of the difference.
_FUSED_SHARE = 0.35
_OPTIMIZER = "optimizer"
_AROUND_UPDATE = ("backward", _OPTIMIZER)


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the two moments that may be highest."""

    passes_bytes: float
    step_bytes: float
    doubt_bytes: float = 0.0

    def highest(self) -> PeakMemory:
        size = max(self.passes_bytes, self.step_bytes)
        low = max(self.passes_bytes - self.doubt_bytes, self.step_bytes * (1 - _WHOLE))
        high = max(self.passes_bytes + self.doubt_bytes, self.step_bytes * (1 + _WHOLE))
        return PeakMemory(size_bytes=round(size), low_bytes=round(low), high_bytes=round(high))


def changed_peak(levels: GraphLevels, memory: Memory, change: MemoryChange) -> PeakMemory | None:
    """None without a graph, or if the script's own hooks hide a part of it."""
    captured = levels.captured
    if not levels.has_graph or memory.largest_batch is None:
        return None
    lines = memory.largest_batch.lines
    unfused = replace(change, fuse=False)
    present, doubt = _passes_at(lines, captured, change.batch, has_account=levels.has_account)
    if change.batch != 1.0:
        present = max(present, later_peak(levels, change.batch) or 0.0)
    then, workspace_doubt = passes_then(levels, present, unfused)
    if not change.moves_passes and change.batch == 1.0:
        workspace_doubt = 0.0  # as measured
    fusible = levels.level(unfused) - levels.level(change) if change.fuse else 0.0
    doubt += workspace_doubt + _MOVED * abs(then - present) + _WHOLE * present + 0.5 * fusible
    return Peaks(
        passes_bytes=then - fusible * (1 - _FUSED_SHARE),
        step_bytes=_step_bytes(captured, change),
        doubt_bytes=doubt,
    ).highest()


def _passes_at(
    lines: tuple[BatchLine, ...], captured: CapturedMemory, factor: float, *, has_account: bool
) -> tuple[float, float]:
    """The highest point of forward and backward at a multiple of the batch, and its doubt."""
    phase = captured.peak.phase if captured.peak else None
    chosen = [
        line
        for line in lines
        if (line.moment == "after forward" and not has_account)
        or (line.moment == "peak" and has_account and phase != _OPTIMIZER)
        or (line.moment.startswith("in ") and has_account and _OPTIMIZER not in line.moment)
    ]
    size, low, high = peak_at(tuple(chosen) or lines, factor)
    return float(size), float(max(size - low, high - size))


def _step_bytes(captured: CapturedMemory, change: MemoryChange) -> float:
    """The highest point of the optimizer's step: measured, or what is there before and after it
    and what its form needs in between."""
    peak = captured.peak
    if peak is not None and peak.phase == _OPTIMIZER and not change.other_update:
        return float(peak.allocated_bytes or _sum(peak.categories))
    held = [_sum(end.categories) for end in captured.phases if end.phase in _AROUND_UPDATE]
    return float(max(held, default=0) + change.update_bytes)


def _sum(categories: CapturedCategories) -> int:
    return sum(size or 0 for size in categories.values())
