"""How long a kernel would take: a few microseconds to start, then the roofline, less what is lost.

Shares of the peak were taken from matmuls, attention and convolutions of the models in
benchmarks/workloads and of GPT-2 small on an H200 (docs/accuracy.md). They are shares of a data
sheet's peak; of a peak that `calibrate` measured, matmuls reach nearly all.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Floats
    from stepscope.records.efficiency import Ceilings

FLOOR_NS = 2_000.0  # no kernel is shorter
MEMORY_SHARE = 0.8  # of the bandwidth, by kernels that only move bytes


class Family(IntEnum):
    """Kernels that scale alike."""

    OTHER = 0
    MATMUL = 1
    ATTENTION = 2
    CONVOLUTION = 3
    RECURRENT = 4


_ATTENTION = re.compile(r"attention|flash_attn", re.IGNORECASE)
_CONVOLUTION = re.compile(r"conv", re.IGNORECASE)
_RECURRENT = re.compile(r"rnn|lstm|gru|mkldnn_rnn", re.IGNORECASE)


def family_of(operator: str, flops: float) -> Family:
    """By the operator's name; only what multiplies matrices has one."""
    if flops == 0:
        return Family.OTHER
    if _ATTENTION.search(operator):
        return Family.ATTENTION
    if _CONVOLUTION.search(operator):
        return Family.CONVOLUTION
    if _RECURRENT.search(operator):
        return Family.RECURRENT
    return Family.MATMUL if flops > 0 else Family.OTHER


class Law(msgspec.Struct, frozen=True, kw_only=True):
    """time = start + max(FLOPs / (share x peak), bytes / (share x bandwidth))."""

    start_ns: float
    compute: float
    memory: float


# Measured; backward of a convolution is two of them and the changes of layout around them.
_LAWS: dict[tuple[Family, bool], Law] = {
    (Family.MATMUL, False): Law(start_ns=3_500, compute=0.80, memory=0.5),
    (Family.MATMUL, True): Law(start_ns=3_500, compute=0.80, memory=0.5),
    (Family.ATTENTION, False): Law(start_ns=5_000, compute=0.60, memory=0.5),
    (Family.ATTENTION, True): Law(start_ns=5_000, compute=0.46, memory=0.25),
    (Family.CONVOLUTION, False): Law(start_ns=8_000, compute=0.22, memory=0.35),
    (Family.CONVOLUTION, True): Law(start_ns=16_000, compute=0.25, memory=0.35),
    (Family.RECURRENT, False): Law(start_ns=5_000, compute=0.25, memory=0.4),
    (Family.RECURRENT, True): Law(start_ns=5_000, compute=0.25, memory=0.4),
}
# tf32 reads inputs in one order only: products over the samples (gradients of weights) are slow.
_TF32 = {False: 0.78, True: 0.48}


def roofline_ns(
    family: Family,
    flops: Floats,
    bytes_moved: Floats,
    dtype: str,
    ceilings: Ceilings,
    *,
    backward: bool,
) -> Floats:
    """What operators of one family would take in a dtype."""
    law = _LAWS[family, backward]
    share = law.compute
    if dtype == "tf32":
        share = share * _TF32[backward] / 0.8
    if ceilings.flops_source.get(dtype) == "calibrated":
        share = min(1.0, share / 0.8)
    compute = flops / (share * ceilings.flops[dtype]) * 1e9
    memory = np.zeros_like(flops)
    if ceilings.bytes_s:
        memory = np.maximum(bytes_moved, 0) / (law.memory * ceilings.bytes_s) * 1e9
    found: Floats = law.start_ns + np.maximum(compute, memory)
    return found


def copy_ns(bytes_moved: Floats | float, ceilings: Ceilings) -> Floats:
    """A kernel that only moves bytes."""
    rate = MEMORY_SHARE * (ceilings.bytes_s or 1e12)
    found: Floats = FLOOR_NS + np.asarray(bytes_moved, np.float64) / rate * 1e9
    return found
