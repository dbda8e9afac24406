"""Training through a parameter server: what its workers and shards recorded, as columns,
what the run showed, and what another consistency promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from stepscope.records.change_values import Consistency
    from stepscope.records.quality import Note

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

# Field names are the words of the JSON contract (docs/reference/json.md, `together`).

# Who is slow: nobody, always or mostly the same worker, or a different worker each time.
StragglingKind = Literal["none", "persistent", "transient"]
# Of a consistency that lets workers run ahead; a barrier at every step is what it is compared with.
TogetherVerdict = Literal["pays", "does not pay", "barrier", "one worker"]


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


class Straggling(msgspec.Struct, frozen=True, kw_only=True):
    """The mean step under three rules of waiting, from the workers' own times: free <= slowest <=
    barrier."""

    kind: StragglingKind
    workers: int
    barrier_ms: float  # all wait for the slowest, at every step
    slowest_ms: float  # the slowest worker's mean step: no bound on staleness beats it for long
    free_ms: float  # nobody waits: the workers' mean pace
    worker: int  # the slowest on average
    typical_ratio: float  # its median step over the median of the others'
    always: bool  # it is slow at every step, not only on average


class WorkerShare(msgspec.Struct, frozen=True, kw_only=True):
    """Where one worker's time went: blocked + pull + compute + push + other = whole, exactly."""

    worker: int
    steps: int
    whole_ns: int
    blocked_ns: int  # until the consistency let it read
    pull_ns: int
    compute_ns: int
    push_ns: int
    other_ns: int
    pulled_bytes: int
    pushed_bytes: int
    mean_gap: float | None  # of its reads, in clocks
    resent: int  # messages that were sent again


class BlockedBy(msgspec.Struct, frozen=True, kw_only=True):
    """How long a worker was blocked, and who the last one was that it waited for."""

    worker: int
    by: int
    blocked_ns: int
    times: int


class ShardLoad(msgspec.Struct, frozen=True, kw_only=True):
    shard: int
    size_bytes: int | None  # of the parameters it holds
    updates: int  # that it applied
    pulls: int  # that it answered
    busy_ns: int
    busy_share: float  # of the time from the first event to the last
    mean_queue: float | None  # requests that waited when one was taken up
    largest_queue: int | None
    mean_wait_ms: float | None  # of a request, in the queue


class LossPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The mean loss of some updates, at the time and the number of the last of them."""

    s: float  # since the first pull
    updates: int
    loss: float


class TogetherSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run through a parameter server."""

    consistency: str
    verdict: TogetherVerdict
    why: str  # a sentence
    optimizer: str
    compression: str | None
    updates: int  # gradients that workers pushed
    span_s: float  # from the first event to the last
    updates_per_s: float  # all workers' paces together
    barrier_updates_per_s: float | None  # what a barrier at every step would have given
    blocked_share: float  # of the workers' time
    staleness: Staleness
    straggling: Straggling | None  # None for one worker
    workers: tuple[WorkerShare, ...]
    blocks: tuple[BlockedBy, ...]  # the longest first
    shards: tuple[ShardLoad, ...]
    losses: tuple[LossPoint, ...] = ()
    evicted: tuple[int, ...] = ()  # workers
    restored: tuple[int, ...] = ()  # shards
    lost_updates: int = 0  # that restored shards do not contain
    notes: tuple[Note, ...] = ()

    @property
    def gain(self) -> float | None:
        """Updates per second over those of a barrier at every step."""
        if not self.barrier_updates_per_s:
            return None
        return self.updates_per_s / self.barrier_updates_per_s


# What a parameter server's workers and shards recorded, as columns (records/folders.py says what
# each event is). Times are nanoseconds; -1 stands for what a line leaves out, NaN for a loss.


class PullColumns(msgspec.Struct, frozen=True, kw_only=True):
    worker: Ints
    life: Ints
    clock: Ints
    at_unix_ns: Ints
    blocked_ns: Ints
    transfer_ns: Ints
    size_bytes: Ints
    gap: Ints
    waited_for: Ints

    def __len__(self) -> int:
        return len(self.worker)


class PushColumns(msgspec.Struct, frozen=True, kw_only=True):
    worker: Ints
    life: Ints
    clock: Ints
    at_unix_ns: Ints
    compute_ns: Ints
    took_ns: Ints
    refused_ns: Ints
    size_bytes: Ints
    resent: Ints
    loss: Floats

    def __len__(self) -> int:
        return len(self.worker)


class RequestColumns(msgspec.Struct, frozen=True, kw_only=True):
    """What shards did: applied updates, or answered pulls."""

    shard: Ints
    at_unix_ns: Ints
    took_ns: Ints
    queue: Ints
    waited_ns: Ints
    gradients: Ints  # how many an update held; 0 for a pull

    def __len__(self) -> int:
        return len(self.shard)


class TogetherEvents(msgspec.Struct, frozen=True, kw_only=True):
    consistency: Consistency
    shard_bytes: dict[int, int]  # by shard: the parameters it holds
    optimizer: str
    compression: str | None
    pulls: PullColumns
    pushes: PushColumns
    applied: RequestColumns
    served: RequestColumns
    evicted: tuple[int, ...] = ()  # workers, one for each time
    restored: tuple[int, ...] = ()  # shards, one for each time
    lost_updates: int = 0  # that restored shards do not contain
    notes: tuple[Note, ...] = ()
