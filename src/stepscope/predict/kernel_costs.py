"""Price a kernel: its start, its share of the roofline, kernels on several streams, and the
launch of a CUDA graph.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.predict.fitted import fitted, table
from stepscope.step.call_tree import distinct_counts, group
from stepscope.text.words import lazy_pattern

if TYPE_CHECKING:
    from stepscope.records.hardware import Ceilings
    from stepscope.step.graph import Floats, Ints, StepGraph

# How long a kernel would take: a few microseconds to start, then its share of the roofline.
#
# Shares are of the data sheet's peak. Matmuls reach nearly all of a peak that `calibrate` measured.
# tensor_cores.py knows dense convolutions by their shapes; the shares here are for the others.

ALIGNED_BYTES = 16  # that a product's rows have to start at a multiple of
FLOOR_NS = fitted("kernels.floor_ns")  # no kernel is shorter
MEMORY_SHARE = fitted("kernels.memory_share")  # of the bandwidth, by kernels that only move bytes
_CALIBRATED_SHARE = fitted("kernels.calibrated_share")  # of the data sheet's peak


class Family(IntEnum):
    """Kernels that scale in the same way."""

    OTHER = 0
    MATMUL = 1
    ATTENTION = 2
    CONVOLUTION = 3
    RECURRENT = 4


# A name may match several; the first counts.
_FAMILIES = (
    (Family.ATTENTION, lazy_pattern(r"attention|flash_attn", re.IGNORECASE)),
    (Family.CONVOLUTION, lazy_pattern(r"conv", re.IGNORECASE)),
    (Family.RECURRENT, lazy_pattern(r"rnn|lstm|gru|mkldnn_rnn", re.IGNORECASE)),
)


def family_of(operator: str, flops: float) -> Family:
    """Read the operator's name; an operator without FLOPs is OTHER."""
    if flops != 0:
        for family, pattern in _FAMILIES:
            if pattern.search(operator):
                return family
    return Family.MATMUL if flops > 0 else Family.OTHER


class KernelCost(msgspec.Struct, frozen=True, kw_only=True):
    """time = start + max(FLOPs / (share x peak), bytes / (share x bandwidth))."""

    start_ns: float
    compute: float
    memory: float


# Forward and backward. Backward of a convolution is two convolutions and the layout changes around
# them. tf32 reads inputs in one order only: products over the samples (gradients of weights) are
# slow.
_COSTS = table("kernels.roofline", dict[str, tuple[KernelCost, KernelCost]])
_TF32 = table("kernels.tf32_share", tuple[float, float])
# Matmuls whose rows do not start at multiples of ALIGNED_BYTES, by what they start at multiples of.
_UNALIGNED = table("kernels.unaligned", dict[str, dict[int, tuple[float, float]]])


def roofline_ns(
    family: Family,
    flops: Floats,
    bytes_moved: Floats,
    dtype: str,
    ceilings: Ceilings,
    *,
    backward: bool,
    alignment: Ints | None = None,
) -> Floats:
    """How long operators of one family would take in a dtype. `alignment` of the rows of matrix
    products, in bytes; else they count as aligned."""
    cost = _COSTS[family.name][backward]
    share = np.full(len(flops), cost.compute)
    if dtype == "tf32":
        share *= _TF32[backward] / 0.8
    if alignment is not None and family == Family.MATMUL:
        for rows_bytes, shares in _UNALIGNED["tf32" if dtype == "tf32" else "narrow"].items():
            share[alignment == rows_bytes] = shares[backward]
    if ceilings.flops_source.get(dtype) == "calibrated":
        share = np.minimum(1.0, share / _CALIBRATED_SHARE)
    compute = flops / (share * ceilings.flops[dtype]) * 1e9
    memory = np.zeros_like(flops)
    if ceilings.bytes_s:
        memory = np.maximum(bytes_moved, 0) / (cost.memory * ceilings.bytes_s) * 1e9
    total: Floats = cost.start_ns + np.maximum(compute, memory)
    return total


def sheet_flops(ceilings: Ceilings, dtype: str) -> float:
    """The data sheet's peak, also where `calibrate` measured one."""
    measured = ceilings.flops_source.get(dtype) == "calibrated"
    return ceilings.flops[dtype] / (_CALIBRATED_SHARE if measured else 1.0)


def copy_ns(bytes_moved: Floats | float, ceilings: Ceilings) -> Floats:
    rate = MEMORY_SHARE * (ceilings.bytes_s or 1e12)
    total: Floats = FLOOR_NS + np.asarray(bytes_moved, np.float64) / rate * 1e9
    return total


# Operators whose kernels run on several streams, as cuDNN runs the parts of a grouped convolution.
#
# Each kernel fills the device, so the parts take turns: a trace shows a wait on one stream while
# the kernels of another run. Such a wait becomes longer and shorter with these kernels.


def with_durations(graph: StepGraph, dur_ns: Floats) -> StepGraph:
    return replace(graph, tasks=replace(graph.tasks, dur_ns=dur_ns))


def after_start(dur_ns: Floats, factor: Floats | float) -> Floats:
    """Kernels whose time changes by a factor, except for their start."""
    start = np.minimum(dur_ns, FLOOR_NS)
    changed: Floats = start + (dur_ns - start) * factor
    return changed


def retime_tasks(graph: StepGraph, dur_ns: Floats, operator: Ints) -> StepGraph:
    """The graph with other durations, one for each task; `operator` is the host row of each task's
    operator, -1 if not known."""
    tasks = graph.tasks
    known = operator >= 0
    first, _, _ = group(operator[known], tasks.stream[known])
    rows, streams = distinct_counts(operator[known][first])
    growth = np.ones(len(dur_ns))
    for row in rows[streams > 1].tolist():  # new over old time of all kernels of the operator
        mine = operator == row
        growth[mine] = float(dur_ns[mine].sum()) / max(1.0, float(tasks.dur_ns[mine].sum()))
    return replace(
        graph,
        tasks=replace(
            tasks,
            dur_ns=dur_ns,
            spacing_ns=tasks.spacing_ns * growth,
            after_ns=tasks.after_ns * growth,
        ),
    )


# What launching a CUDA graph costs.

SPACING_NS = fitted("kernels.graph_spacing_ns")
LAUNCH_NS, PER_NODE_NS = fitted("kernels.graph_launch_ns"), fitted("kernels.graph_node_ns")
COMPILED_SPACING_NS = fitted("kernels.compiled_spacing_ns")
