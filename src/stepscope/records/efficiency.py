"""How much of the device's ability a step used. Rates are per second, times integer nanoseconds."""

from __future__ import annotations

from typing import Literal

import msgspec

PeakSource = Literal["table", "calibrated"]
Bound = Literal["compute", "memory", "unknown"]


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """What the device can do at best, and who says so."""

    device: str
    flops: dict[str, float]  # dtype (fp64, fp32, tf32, fp16, bf16, fp8) -> dense FLOP/s
    bytes_s: float | None  # memory traffic, read and write together
    flops_source: dict[str, PeakSource]
    bytes_source: PeakSource | None
    source: str  # where the figures are from, as a sentence
    threads: int | None = None  # that a CPU's figures were measured with
    doubt: str = ""  # why the measured figures may be too low, as a sentence; empty where none


class DtypeUse(msgspec.Struct, frozen=True, kw_only=True):
    """Matmul-like work of one dtype."""

    dtype: str
    flops: int  # of one step
    device_ns: int  # of one step
    tensor_core_ns: int  # of that, in kernels that used tensor (matrix) cores
    peak_flops: float | None


class Spot(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one operator with the same shapes, on the roofline. Amounts are of one step."""

    operator: str
    shapes: str
    dtype: str
    calls: float
    device_ns: float
    flops: float | None
    bytes_moved: float | None
    intensity: float | None  # FLOPs a byte
    achieved_flops: float | None  # a second
    ceiling_flops: float | None  # a second, at this intensity
    roof_ns: float | None  # max(FLOPs / peak, bytes / bandwidth)
    gap_ns: float | None  # device_ns - roof_ns
    bound: Bound
    phase: Literal["forward", "backward", "optimizer", "other"]
    recomputed: bool = False


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs of one step against the peak of the dtype that did most of them."""

    mfu: float | None
    hfu: float | None
    model_flops: int
    hardware_flops: int  # model and recomputed
    recomputed_flops: int
    peak_flops: float | None
    peak_source: PeakSource | None
    dtype: str | None
    unknown_share: float  # of device time: kernels whose FLOPs nobody can tell
    tensor_core_share: float | None  # of matmul-like device time
    step_ms: float | None  # the step that MFU is taken over
    by_dtype: tuple[DtypeUse, ...]
    ceilings: Ceilings | None
    spots: tuple[Spot, ...]  # the widest gap first
    devices: int = 1  # that this rank computed on
    notes: tuple[str, ...] = ()  # what was assumed, such as an unknown causal mask
