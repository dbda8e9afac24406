"""One recorded step on many GPUs, side by side."""

from __future__ import annotations

from typing import Literal

import msgspec

Decider = Literal["device", "host"]


class GpuPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """The step on one GPU. What cannot be said is None, and `why` says the reason."""

    gpu: str
    step_ms: float | None
    low_ms: float | None = None
    high_ms: float | None = None
    speedup: float | None = None  # over the step as recorded
    samples_per_s: float | None = None  # None if those of a step are not known
    decides: Decider | None = None
    device_ms: float | None = None
    host_ms: float | None = None
    modelled_share: float | None = None  # of the device time: by bandwidth alone
    fits: bool | None = None  # None: peak memory is not known
    memory_bytes: float
    largest_batch: int | None = None
    price: float | None = None  # per hour
    samples_per_money: float | None = None  # steps, if the batch is not known
    why: str = ""


class GpuComparison(msgspec.Struct, frozen=True, kw_only=True):
    source: str  # as the driver prints it
    source_gpu: str  # its name in the table
    batch: int | None
    baseline_ms: float
    peak_bytes: int | None
    gpus: tuple[GpuPrediction, ...]  # the shortest step first, those without one last

    @property
    def counts_samples(self) -> bool:
        """Steps are counted where the samples of a step are not known."""
        return any(row.samples_per_s is not None for row in self.gpus)
