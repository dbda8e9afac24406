"""An all-reduce in parts: inside hosts, between them, and inside hosts again."""

from __future__ import annotations

import msgspec


class HierarchicalAllReduce(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduces made of parts inside hosts and between them. Their calls belong to a strategy
    too. Times are means over the ranks, per step."""

    ranks: tuple[int, ...]
    hosts: int  # in a group between hosts
    ranks_per_host: int  # in a group inside a host
    reduce: str  # the first part: reduce_scatter or reduce
    gather: str | None  # the last part: all_gather or broadcast; None if results stay sharded
    size_bytes: int  # of one
    count: float  # per step
    inside_ns: int  # first and last part
    between_ns: int
