"""Private pools of the CUDA allocator: segments that a CUDA graph keeps for its replays.

Every replay writes into all that its recording allocated. The allocator counts as free what the
recording released again, but gives it to nobody else. So a pool counts as what it holds: all of its
segments. The same goes for pools that the script makes (`torch.cuda.MemPool`).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stepscope.measure.storages import Key

_SHARED = (0, 0)  # the number of the pool that every allocation may use


@dataclass(frozen=True, slots=True)
class PrivatePools:
    """All of one process at one moment; empty where nothing is recorded."""

    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes of each pool's segments
    live_bytes: int = 0  # of these, what the allocator counts as allocated
    requested_bytes: int = 0  # of the live ones, as they were asked for
    ranges: tuple[tuple[int, int], ...] = ()  # addresses, sorted: first, and the one after the last

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes.values())

    def hold(self, address: int) -> bool:
        """Whether the address lies in one of the segments."""
        place = bisect_right(self.ranges, (address, 1 << 64)) - 1
        return place >= 0 and address < self.ranges[place][1]

    def bytes_of(self, storages: Mapping[Key, int]) -> int:
        """Of these storages, the bytes that lie in the pools."""
        if not self.ranges:
            return 0
        return sum(size for (_, address), size in storages.items() if self.hold(address))

    def kept_for(self, known: Iterable[Mapping[Key, int]], activations: int) -> tuple[int, int]:
        """Besides known storages: what is kept for these activations, and what for something else.
        A graph keeps their place, alive or not, unless something known lies there now: gradients
        often do, once backward is done with activations."""
        room = max(0, self.size_bytes - sum(map(self.bytes_of, known)))
        kept = min(activations, room)
        return kept, room - kept

    def content(self, unknown_bytes: int) -> dict[str, Any]:
        """For memory.json, the largest first; nothing without pools."""
        if not self.sizes:
            return {}
        ranked = sorted(self.sizes.items(), key=lambda item: -item[1])
        pools = [{"pool": name, "bytes": size} for name, size in ranked]
        return {"pools": pools, "pools_unknown_bytes": unknown_bytes}


NO_POOLS = PrivatePools()


def read_pools(segments: Iterable[Mapping[str, Any]], devices: Sequence[int]) -> PrivatePools:
    """From `torch.cuda.memory_snapshot()`. Before torch 2.1, segments do not name their pool."""
    sizes: dict[str, int] = {}
    ranges: list[tuple[int, int]] = []
    live = requested = 0
    for segment in segments:
        pool = tuple(segment.get("segment_pool_id", _SHARED))
        if pool == _SHARED or int(segment["device"]) not in devices:
            continue
        size, address = int(segment["total_size"]), int(segment["address"])
        name = ".".join(map(str, pool))
        sizes[name] = sizes.get(name, 0) + size
        ranges.append((address, address + size))
        for block in segment.get("blocks", ()):
            if block.get("state") == "active_allocated":
                live += int(block["size"])
                requested += int(block.get("requested_size", block["size"]))
    return PrivatePools(sizes, live, requested, tuple(sorted(ranges)))
