"""What is planned about workers, and the exchange of gradients that follows from it."""

from __future__ import annotations

import msgspec


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for about workers."""

    ranks: int
    strong: bool = False  # the batch of all workers together stays
    bucket_mb: float | None = None  # as traced, else DDP's own
    bandwidth: float = 1.0
    latency: float = 1.0
    stage: int = 0  # of ZeRO


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    ranks: int
    before: int  # workers of the trace
    basis: str
    buckets: int
    size_bytes: int
    comm_ns: float  # collectives one after the other
    exposed_ns: float  # what they add to the step
    least_ns: float  # no link makes the step shorter
    straggling: float  # the slowest worker's step over a usual one
    held_bytes: int = 0  # of DDP's buckets, where the trace has none yet
    said: str = ""
