"""Kernels with too little work for all multiprocessors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import LOW, RankEvidence, kernel_severity
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.trace import Trace
from stepscope.step.call_tree import group
from stepscope.step.statistics import median
from stepscope.step.work import Kind
from stepscope.text.figures import duration, percent
from stepscope.text.words import counted

_TOO_MANY = 1 << 62  # of a damaged file
SHORT_NS = 20_000  # longer kernels with few blocks are built that way

if TYPE_CHECKING:
    from stepscope.explain.kernels import Launched
    from stepscope.step.arrays import Floats, Int64s


def find(evidence: RankEvidence) -> Finding | None:
    """Most kernel time is short kernels with fewer blocks than the device has multiprocessors."""
    trace, launched = evidence.trace, evidence.launched
    units = _count_multiprocessors(trace)
    if evidence.on_host or units is None:
        return None
    blocks = _count_blocks(trace, launched)
    known = (blocks > 0) & (launched.kind == Kind.COMPUTE)
    filled = np.minimum(1.0, blocks / units)
    small = known & (filled < 1) & (launched.dur_ns < SHORT_NS)
    busy = int(launched.dur_ns[known].sum())
    lost = evidence.device_share(float((launched.dur_ns * (1 - filled))[small].sum()))
    if lost < LOW or 2 * launched.dur_ns[small].sum() < busy:
        return None
    return RULE.finding(
        share=lost,
        severity=kernel_severity(evidence, lost),
        summary=f"{percent(lost)} of the step is lost because most kernels are too small to fill "
        f"the {evidence.device}'s {units} multiprocessors.",
        evidence=(
            f"{int(small.sum()):,} of {counted(int(known.sum()), 'kernel')} have fewer blocks than "
            f"multiprocessors: {percent(launched.dur_ns[small].sum() / busy)} of kernel time",
            f"while they run, {percent(_mean(filled[small], launched.dur_ns[small]))} of the "
            "multiprocessors have work",
            f"the median kernel runs {duration(median(launched.dur_ns[known]))} with "
            f"{counted(int(median(blocks[known])), 'block')}",
            f"idle between kernels: {evidence.budget_ms('idle_launch', 'operators', 'python')}",
        ),
        remedies=(
            remedies.BATCH.offer("Use a larger batch: more blocks run in the same time"),
            remedies.COMPILE.offer("Call torch.compile(model): it fuses small kernels"),
            remedies.CUDA_GRAPHS.offer(
                "If the batch cannot grow, capture the step with torch.cuda.graph() and replay it"
            ),
        ),
    )


def _count_multiprocessors(trace: Trace) -> int | None:
    """Of the device in use; CUDA only, because AMD's profiler counts grids in threads."""
    used = set(trace.device.device.tolist())
    known = [device.multiprocessors for device in trace.devices if device.id in used]
    return known[0] if trace.kind == "cuda" and known and known[0] > 0 else None


def _count_blocks(trace: Trace, launched: Launched) -> Int64s:
    """Blocks of each kernel's grid; 0 where it is not recorded."""
    grid = trace.device.grid[launched.rows]
    first, inverse, _ = group(grid)
    sizes = [_parse_grid(trace.strings[code]) if code >= 0 else 0 for code in grid[first].tolist()]
    return np.array(sizes, np.int64)[inverse]


def _parse_grid(grid: str) -> int:
    try:
        blocks = math.prod(int(side) for side in msgspec.json.decode(grid))
    except (TypeError, ValueError, msgspec.DecodeError):
        return 0
    return blocks if blocks < _TOO_MANY else 0


def _mean(values: Floats, weights: Int64s) -> float:
    return float((values * weights).sum() / max(1, weights.sum()))


RULE = FindingRule(id="small-batch", title="Kernels too small", find=find)
