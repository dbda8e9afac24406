"""Training through a parameter server: what a run showed, and what another consistency promises.

Field names are the words of the JSON contract (docs/json.md, `together`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    """Read gaps of pulls, in clocks: `counts[n]` pulls had a gap of n."""

    counts: tuple[int, ...]

    @classmethod
    def of(cls, gaps: NDArray[np.int64]) -> Staleness:
        return cls(counts=tuple(np.bincount(gaps).tolist()) if len(gaps) else ())

    @property
    def pulls(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        if not self.pulls:
            return None
        return sum(gap * count for gap, count in enumerate(self.counts)) / self.pulls

    @property
    def largest(self) -> int | None:
        return len(self.counts) - 1 if self.counts else None


class ConsistencyPromise(msgspec.Struct, frozen=True, kw_only=True):
    """What a consistency would give, simulated. An update is one worker's gradient; in strong
    consistency those of a step are applied together and still count one each."""

    consistency: str
    workers: int
    updates_per_s: float
    low: float  # 95%, of updates_per_s
    high: float
    step_ms: float  # of one worker, on average
    blocked_share: float  # of the workers' time
    staleness: Staleness
    steps: int  # per worker that were simulated
    queued: bool  # servers that serve one request after the other were simulated
