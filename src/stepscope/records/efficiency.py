"""How much of the device's peak a step used. Rates are per second, times integer nanoseconds."""

from __future__ import annotations

from typing import Literal

import msgspec

from stepscope.records.place import Place  # noqa: TC001  (decoded)

PeakSource = Literal["table", "calibrated"]
Bound = Literal["compute", "memory", "unknown"]
Phase = Literal["forward", "backward", "optimizer", "other"]


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """The device's peaks, and where each comes from."""

    device: str
    flops: dict[str, float]  # dtype (fp64, fp32, tf32, fp16, bf16, fp8) -> dense FLOP/s
    bytes_s: float | None  # memory traffic, read and write together
    flops_source: dict[str, PeakSource]
    bytes_source: PeakSource | None
    source: str  # where the figures come from, as a sentence
    threads: int | None = None  # used to measure a CPU's figures
    doubt: str = ""  # why the measured figures may be too low, as a sentence; may be empty


class DtypeUse(msgspec.Struct, frozen=True, kw_only=True):
    """Matmul-like work of one dtype."""

    dtype: str
    flops: int  # in one step
    device_ns: int  # in one step
    tensor_core_ns: int  # the part in kernels that used tensor (matrix) cores
    peak_flops: float | None


class Spot(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one operator with the same shapes, on the roofline. Amounts are per step."""

    operator: str
    shapes: str
    dtype: str
    calls: float
    device_ns: float
    flops: float | None
    bytes_moved: float | None
    intensity: float | None  # FLOPs per byte
    achieved_flops: float | None  # per second
    ceiling_flops: float | None  # per second, at this intensity
    roof_ns: float | None  # max(FLOPs / peak, bytes / bandwidth)
    gap_ns: float | None  # device_ns - roof_ns
    bound: Bound
    phase: Phase
    recomputed: bool = False
    place: Place | None = None  # of a compiled kernel, and of the optimizer's: its line


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
    unknown_share: float  # of device time: kernels whose FLOPs are unknown
    tensor_core_share: float | None  # of matmul-like device time
    step_ms: float | None  # the step that MFU is computed over
    by_dtype: tuple[DtypeUse, ...]
    ceilings: Ceilings | None
    spots: tuple[Spot, ...]  # the widest gap first
    devices: int = 1  # on which this rank computed
    notes: tuple[str, ...] = ()  # what was assumed, such as an unknown causal mask
