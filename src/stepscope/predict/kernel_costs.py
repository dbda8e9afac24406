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

from stepscope.text.words import lazy_pattern

if TYPE_CHECKING:
    from stepscope.records.hardware import Ceilings
    from stepscope.step.graph import Floats, Ints, StepGraph

# How long a kernel would take: a few microseconds to start, then its share of the roofline.
#
# The shares were measured on matmuls, attention and convolutions of the models in
# benchmarks/workloads and of GPT-2 small on an H200 (docs/records/predictions.md). They are shares
# of the data sheet's peak. Matmuls reach nearly all of a peak that `calibrate` measured.
# tensor_cores.py knows dense convolutions by their shapes; the shares here are for the others.

FLOOR_NS = 2_000.0  # no kernel is shorter
MEMORY_SHARE = 0.8  # of the bandwidth, by kernels that only move bytes
_CALIBRATED_SHARE = 0.8  # of the data sheet's peak, that `calibrate` measures


class Family(IntEnum):
    """Kernels that scale in the same way."""

    OTHER = 0
    MATMUL = 1
    ATTENTION = 2
    CONVOLUTION = 3
    RECURRENT = 4


_ATTENTION = lazy_pattern(r"attention|flash_attn", re.IGNORECASE)
_CONVOLUTION = lazy_pattern(r"conv", re.IGNORECASE)
_RECURRENT = lazy_pattern(r"rnn|lstm|gru|mkldnn_rnn", re.IGNORECASE)


def family_of(operator: str, flops: float) -> Family:
    """By the operator's name; an operator without FLOPs is OTHER."""
    if flops == 0:
        return Family.OTHER
    if _ATTENTION.search(operator):
        return Family.ATTENTION
    if _CONVOLUTION.search(operator):
        return Family.CONVOLUTION
    if _RECURRENT.search(operator):
        return Family.RECURRENT
    return Family.MATMUL if flops > 0 else Family.OTHER


class KernelCost(msgspec.Struct, frozen=True, kw_only=True):
    """time = start + max(FLOPs / (share x peak), bytes / (share x bandwidth))."""

    start_ns: float
    compute: float
    memory: float


# Measured. Backward of a convolution is two convolutions and the layout changes around them.
_COSTS: dict[tuple[Family, bool], KernelCost] = {
    (Family.MATMUL, False): KernelCost(start_ns=3_500, compute=0.80, memory=0.5),
    (Family.MATMUL, True): KernelCost(start_ns=3_500, compute=0.80, memory=0.5),
    (Family.ATTENTION, False): KernelCost(start_ns=5_000, compute=0.60, memory=0.5),
    (Family.ATTENTION, True): KernelCost(start_ns=5_000, compute=0.46, memory=0.25),
    (Family.CONVOLUTION, False): KernelCost(start_ns=8_000, compute=0.22, memory=0.35),
    (Family.CONVOLUTION, True): KernelCost(start_ns=16_000, compute=0.25, memory=0.35),
    (Family.RECURRENT, False): KernelCost(start_ns=5_000, compute=0.25, memory=0.4),
    (Family.RECURRENT, True): KernelCost(start_ns=5_000, compute=0.25, memory=0.4),
}
# tf32 reads inputs in one order only: products over the samples (gradients of weights) are slow.
_TF32 = {False: 0.78, True: 0.48}
ALIGNED_BYTES = 16  # that a product's rows have to start at a multiple of
# Matrix products whose rows do not: measured for vocabularies of 30,522, 50,257 and 51,865 in tf32
# and bf16. Rows of an even number of 8 bytes in 16-bit products were not measured.
_UNALIGNED_TF32 = {8: {False: 0.26, True: 0.23}, 4: {False: 0.23, True: 0.22}}
_UNALIGNED_NARROW = {
    8: {False: 0.27, True: 0.26},
    4: {False: 0.23, True: 0.22},
    2: {False: 0.10, True: 0.13},
}


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
    cost = _COSTS[family, backward]
    share = np.full(len(flops), cost.compute)
    if dtype == "tf32":
        share *= _TF32[backward] / 0.8
    if alignment is not None and family == Family.MATMUL:
        unaligned = _UNALIGNED_TF32 if dtype == "tf32" else _UNALIGNED_NARROW
        for rows_bytes, shares in unaligned.items():
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
    factor = _growth(tasks.dur_ns, dur_ns, operator, _on_several_streams(tasks.stream, operator))
    return replace(
        graph,
        tasks=replace(
            tasks,
            dur_ns=dur_ns,
            spacing_ns=tasks.spacing_ns * factor,
            after_ns=tasks.after_ns * factor,
        ),
    )


def _on_several_streams(stream: Ints, operator: Ints) -> Ints:
    """Operators, by their rows."""
    pairs = np.unique(np.stack((operator, stream), axis=1)[operator >= 0], axis=0)
    rows, streams = np.unique(pairs[:, 0], return_counts=True)
    several: Ints = rows[streams > 1]
    return several


def _growth(before_ns: Floats, after_ns: Floats, operator: Ints, chosen: Ints) -> Floats:
    """Of each task: new over old time of all kernels of its operator; 1 for other operators."""
    growth = np.ones(len(before_ns))
    for row in chosen.tolist():
        mine = operator == row
        growth[mine] = float(after_ns[mine].sum()) / max(1.0, float(before_ns[mine].sum()))
    return growth


# What launching a CUDA graph costs, as measured on an H200.

SPACING_NS = 1_000.0  # between kernels of a graph
LAUNCH_NS = 30_000.0  # of the host, per graph
PER_NODE_NS = 60.0
# Of a compiled graph: seven models took their kernels' time and 0 to 0.3 us for each.
COMPILED_SPACING_NS = 300.0
