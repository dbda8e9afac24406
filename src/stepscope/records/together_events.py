"""What a parameter server's workers and shards recorded, as columns (records/together.py says what
each event is). Times are nanoseconds; -1 stands for what a line leaves out, NaN for a loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from stepscope.records.consistency import Consistency
    from stepscope.records.quality import Note

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]


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
