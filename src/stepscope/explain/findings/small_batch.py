"""Kernels with too little work to give every multiprocessor some."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.call_tree import group
from stepscope.explain.findings.evidence import LOW, RankEvidence, kernel_severity
from stepscope.explain.findings.rule import FindingRule
from stepscope.explain.quantiles import median
from stepscope.explain.work import Kind
from stepscope.records import remedies
from stepscope.records.words import counted

_TOO_MANY = 1 << 62  # of a damaged file
SHORT_NS = 20_000  # a longer kernel with few blocks is built so: a larger batch adds none

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.explain.window_kernels import Launched
    from stepscope.records.explanation import Finding
    from stepscope.records.trace import Trace


def find(evidence: RankEvidence) -> Finding | None:
    """Most kernel time is short kernels with fewer blocks than the device has multiprocessors."""
    trace, launched = evidence.trace, evidence.launched
    units = _multiprocessors(trace)
    if evidence.on_host or units is None:
        return None
    blocks = _blocks(trace, launched)
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
        summary=f"{lost:.0%} of the step is lost to multiprocessors without work: most kernels are "
        f"short and have fewer blocks than the {evidence.device} has multiprocessors ({units}).",
        evidence=(
            f"{int(small.sum())} of {counted(int(known.sum()), 'kernel')} fill less than one wave, "
            f"{launched.dur_ns[small].sum() / busy:.0%} of kernel time",
            f"while they run, {_mean(filled[small], launched.dur_ns[small]):.0%} of the "
            "multiprocessors have a block",
            f"the median kernel runs {median(launched.dur_ns[known]) / 1000:.1f} µs in "
            f"{counted(int(median(blocks[known])), 'block')}",
            f"idle between kernels: {evidence.budget_ms('idle_launch', 'operators', 'python')}",
        ),
        remedies=(
            remedies.BATCH.offer("a larger batch: more blocks in the same time"),
            remedies.COMPILE.offer("torch.compile joins small kernels into fewer"),
            remedies.CUDA_GRAPHS.offer("one launch per step, where the batch cannot grow"),
        ),
    )


def _multiprocessors(trace: Trace) -> int | None:
    """Of the device used. AMD's profiler counts grids in threads, so only CUDA's are read."""
    used = set(trace.device.device.tolist())
    known = [each.multiprocessors for each in trace.devices if each.id in used]
    return known[0] if trace.kind == "cuda" and known and known[0] > 0 else None


def _blocks(trace: Trace, launched: Launched) -> NDArray[np.int64]:
    """Blocks of each grid; 0 where not recorded. Each distinct grid is read once."""
    grid = trace.device.grid[launched.rows]
    first, inverse, _ = group(grid)
    sizes = [_size(trace.strings[code]) if code >= 0 else 0 for code in grid[first].tolist()]
    return np.array(sizes, np.int64)[inverse]


def _size(grid: str) -> int:
    try:
        blocks = math.prod(int(side) for side in msgspec.json.decode(grid))
    except (TypeError, ValueError, msgspec.DecodeError):
        return 0
    return blocks if blocks < _TOO_MANY else 0


def _mean(values: NDArray[np.float64], weights: NDArray[np.int64]) -> float:
    return float((values * weights).sum() / max(1, weights.sum()))


RULE = FindingRule(
    id="small-batch", scope="rank", title="Too little work for the device", find=find
)
