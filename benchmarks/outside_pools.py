"""What the caching allocator holds outside the private pools of CUDA graphs, by its own snapshot.

Free blocks outside pools are a cache: the next tensor may have them. Nobody else can use what is
free inside a pool while its graph lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHARED = (0, 0)  # the number of the pool that all tensors share


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsidePools:
    """At one moment."""

    reserved_bytes: int
    allocated_bytes: int

    @property
    def cached_bytes(self) -> int:
        return self.reserved_bytes - self.allocated_bytes


def bytes_outside_pools(segments: Iterable[dict[str, Any]] | None = None) -> OutsidePools:
    """Of all segments that torch took from the driver."""
    if segments is None:
        import torch

        segments = torch.cuda.memory_snapshot()
    shared = [one for one in segments if tuple(one.get("segment_pool_id", _SHARED)) == _SHARED]
    return OutsidePools(
        reserved_bytes=sum(one["total_size"] for one in shared),
        allocated_bytes=sum(one["allocated_size"] for one in shared),
    )
