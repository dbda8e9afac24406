"""What is planned about workers, and the exchange of gradients that follows from it."""

from __future__ import annotations

import msgspec


class GivenLink(msgspec.Struct, frozen=True, kw_only=True):
    """The link of one host to the others, as the user states it."""

    bytes_s: float
    latency_ns: float | None = None  # of one message; None: not stated


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """So many hosts with as many ranks of the exchange on each as before."""

    count: int
    per_host: int
    before: int
    link: GivenLink | None = None  # None: as captured or calibrated


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    ranks: int
    hosts: HostPlan | None = None  # None: nothing was asked about hosts
    strong: bool = False  # all workers together keep the batch
    bucket_mb: float | None = None  # None: as traced, else DDP's own
    bandwidth: float = 1.0
    latency: float = 1.0
    stage: int = 0  # of ZeRO


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """The planned exchange and what it does to the step."""

    ranks: int
    before: int  # workers of the trace
    basis: str
    buckets: int
    size_bytes: int
    comm_ns: float  # all collectives, one after the other
    exposed_ns: float  # what they add to the step
    least_ns: float  # no link makes the step shorter
    straggling: float  # the slowest worker's step over a usual one
    held_bytes: int = 0  # DDP's buckets, if the trace has none yet
    summary: str = ""
