"""The memory that a workload will need, predicted before it runs."""

from __future__ import annotations

from typing import Literal

import msgspec

LIMIT_S = 90.0  # that a prediction may take
_MARGIN = 0.02  # of free memory: rounding and fragments
# From shapes alone, from two real steps, or from a straight line through smaller real ones.
Method = Literal["shapes", "trained", "smaller batches"]


class PeakRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which training is asked about: a workload in a size, with changed settings."""

    name: str
    size: str
    changes: dict[str, str] = {}
    ranks: int = 1


class PredictedPeak(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; None is "not known"."""

    peak_bytes: int | None = None  # of one rank, as torch's allocator counts
    device: str = "cpu"  # or "cuda"
    free_bytes: int | None = None  # of the host for all its ranks, or of one GPU for its rank
    ranks: int = 1
    batch: int | None = None  # of one rank
    fitting_batch: int | None = None  # if `batch` does not fit: the largest found that does
    method: Method = "shapes"
    notes: tuple[str, ...] = ()

    @property
    def room_bytes(self) -> int | None:
        """That one rank may take."""
        if self.free_bytes is None:
            return None
        sharing = self.ranks if self.device == "cpu" else 1
        return int(self.free_bytes * (1 - _MARGIN)) // sharing

    @property
    def fits(self) -> bool | None:
        """None if that is not known."""
        if self.peak_bytes is None or self.room_bytes is None:
            return None
        return self.peak_bytes <= self.room_bytes
