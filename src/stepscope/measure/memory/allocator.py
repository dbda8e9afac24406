"""The caching allocator's own account: its counters, its history of one step, and the
private pools of CUDA graphs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from stepscope.measure.memory.storages import Key

# Private pools of the CUDA allocator: segments that a CUDA graph keeps for its replays.
#
# Every replay writes into all that its recording allocated. The allocator counts as free what the
# recording released again, but gives it to nobody else. So a pool counts as what it holds: all of
# its segments. The same goes for pools that the script makes (`torch.cuda.MemPool`).

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
    """From `torch.cuda.memory_snapshot()`."""
    sizes: dict[str, int] = {}
    ranges: list[tuple[int, int]] = []
    live = requested = 0
    for segment in segments:
        pool = tuple(segment["segment_pool_id"])
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


# The caching allocator's own account: its counters and its history of one step.
#
# The counters are read and never reset, so the script's own `max_memory_allocated` stays what it
# was. The step's peak comes from replaying the allocator's history, which also shows what held it:
# an address that was seen as a gradient or an activation was one from its allocation to its
# release.

_MOST_EVENTS = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The counters at one moment, summed over the devices of the model. Allocated and requested
    bytes count private pools as what they hold."""

    allocated_bytes: int
    reserved_bytes: int
    requested_bytes: int
    peak_bytes: int  # since the process began or the script's last reset
    allocations: int  # ever made
    pools: PrivatePools = NO_POOLS

    def with_pools(self, pools: PrivatePools) -> Reading:
        """The same moment: of the pools, all that they hold instead of their live blocks."""
        return replace(
            self,
            allocated_bytes=self.allocated_bytes - pools.live_bytes + pools.size_bytes,
            requested_bytes=self.requested_bytes - pools.requested_bytes + pools.size_bytes,
            pools=pools,
        )


class Allocator:
    """The allocator of one kind of device; the CPU's keeps no account."""

    def __init__(self, kind: str, devices: Sequence[int], notes: set[str]) -> None:
        self.kind = kind
        self.devices = list(devices)
        self._notes = notes
        self._module: Any = None if kind == "cpu" else getattr(torch, kind, None)
        self._recording = False
        if kind == "cpu":
            notes.add("temporaries and other are not captured: the CPU allocator has no counters")
        elif len(self.devices) > 1:
            notes.add(f"the model is on {len(self.devices)} devices: their memory is added up")

    def read(self) -> Reading | None:
        """None without an account."""
        reading = self.read_counters()
        return None if reading is None else reading.with_pools(self._read_pools())

    def _read_pools(self) -> PrivatePools:
        if self.kind != "cuda":
            return NO_POOLS
        try:
            return read_pools(self._module.memory_snapshot(), self.devices)
        except Exception as error:
            self._note("private pools of CUDA graphs could not be read", error)
            return NO_POOLS

    def read_counters(self) -> Reading | None:
        """Without a look at private pools, which takes longer."""
        if self._module is None:
            return None
        try:
            stats = [self._module.memory_stats_as_nested_dict(index) for index in self.devices]
            return Reading(
                allocated_bytes=_sum(stats, "allocated_bytes", "current"),
                reserved_bytes=_sum(stats, "reserved_bytes", "current"),
                requested_bytes=_sum(stats, "requested_bytes", "current"),
                peak_bytes=_sum(stats, "allocated_bytes", "peak"),
                allocations=_sum(stats, "allocation", "allocated"),
            )
        except Exception as error:
            self._module = None
            self._note("the allocator's counters could not be read", error)
            return None

    def allocations(self) -> int:
        """A clock that ticks with every allocation and that the history shares."""
        reading = self.read_counters() if self._recording else None
        return reading.allocations if reading is not None else 0

    def start_history(self) -> None:
        """Unless the script records a history itself. Without stacks this costs almost nothing."""
        if self.kind != "cuda" or len(self.devices) != 1 or self._module is None:
            return
        try:
            if torch._C._cuda_isHistoryEnabled():
                self._notes.add(
                    "the script records the allocator's history itself, so stepscope did not"
                )
                return
            torch.cuda.memory._record_memory_history(
                enabled="all", context=None, stacks="python", max_entries=_MOST_EVENTS
            )
            self._recording = True
        except Exception as error:
            self._note("no allocator history", error)

    def stop_history(self) -> list[Mapping[str, Any]] | None:
        """The events since start_history, or None. Recording ends in any case."""
        if not self._recording:
            return None
        self._recording = False
        events: list[Mapping[str, Any]] | None = None
        try:
            events = list(torch.cuda.memory._snapshot()["device_traces"][self.devices[0]])
        except Exception as error:
            self._note("no allocator history", error)
        finally:
            self._end_recording()
        if events is not None and len(events) >= _MOST_EVENTS:
            self._notes.add(
                f"the step has more than {_MOST_EVENTS} allocator events, so their history is not "
                "used"
            )
            return None
        return events

    def _end_recording(self) -> None:
        try:
            torch.cuda.memory._record_memory_history(enabled=None)
        except Exception as error:
            self._note("recording the allocator's history could not be stopped", error)

    def _note(self, what: str, error: Exception) -> None:
        self._notes.add(f"{what}: {type(error).__name__}: {error}")


def _sum(stats: Iterable[Mapping[str, Any]], name: str, which: str) -> int:
    return sum(int(stat.get(name, {}).get("all", {}).get(which, 0)) for stat in stats)


@dataclass(slots=True)
class Labels:
    """What was seen at which address, and when by the allocator's clock."""

    _seen: dict[int, list[tuple[int, str]]] = field(default_factory=dict)

    def add(self, keys: Iterable[Key], category: str, at: int) -> None:
        for _, address in keys:
            self._seen.setdefault(address, []).append((at, category))

    def find(self, address: int, born: int, died: int) -> str | None:
        """The first label given while the block lived."""
        for at, category in self._seen.get(address, ()):
            if born <= at <= died:
                return category
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorPeak:
    """The step's highest point, in requested bytes; categories add up to it."""

    requested_bytes: int
    allocations: int  # the clock then
    categories: dict[str, int]


def held_bytes(_clock: int, level: Mapping[str, int]) -> int:
    """All that is held at a moment."""
    return sum(level.values())


def replay(
    events: Sequence[Mapping[str, Any]],
    *,
    start: Mapping[str, int],
    owners: Mapping[int, str],
    labels: Labels,
    clock: int,
    weigh: Callable[[int, Mapping[str, int]], int] = held_bytes,
    pools: PrivatePools = NO_POOLS,
) -> AllocatorPeak:
    """Follow every allocation and release of the step to the first moment of the largest weight.

    Before the first event, `start` has the bytes by category, `owners` the category of each held
    address and `clock` the number of allocations. All that `pools` hold is in `start`.
    """
    ends = _ends(events, clock)
    level = dict(start)
    highest, at, categories = weigh(clock, level), clock, dict(level)
    blocks: dict[int, tuple[str, int]] = {}
    for place, event in enumerate(events):
        address, size = int(event["addr"]), int(event["size"])
        clock += event["action"] == "alloc"
        if pools.hold(address):
            continue
        if event["action"] == "alloc":
            died = ends.get(place, clock + len(events))
            category = labels.find(address, clock, died) or "temporaries"
            blocks[address] = (category, size)
            level[category] = level.get(category, 0) + size
            weight = weigh(clock, level)
            if weight > highest:
                highest, at, categories = weight, clock, dict(level)
        elif event["action"] == "free_requested":
            category, size = blocks.pop(address, (owners.get(address, "other"), size))
            level[category] = level.get(category, 0) - size
    requested = sum(categories.values())
    return AllocatorPeak(requested_bytes=requested, allocations=at, categories=categories)


def _ends(events: Sequence[Mapping[str, Any]], clock: int) -> dict[int, int]:
    """For each allocation's place in the list, the clock when it was released."""
    born: dict[int, int] = {}
    ends: dict[int, int] = {}
    for place, event in enumerate(events):
        if event["action"] == "alloc":
            clock += 1
            born[int(event["addr"])] = place
        elif event["action"] == "free_requested":
            began = born.pop(int(event["addr"]), None)
            if began is not None:
                ends[began] = clock
    return ends


@dataclass(slots=True)
class PhaseTicks:
    """Which phase ran at which tick of the allocator's clock."""

    ticks: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def begin(self, name: str, tick: int) -> None:
        self.ticks.append(tick)
        self.names.append(name)

    def at(self, tick: int) -> str:
        """The phase in which the allocation with this number was made."""
        return self.names[max(0, bisect_left(self.ticks, tick) - 1)]


def nearest(readings: Sequence[Reading], tick: int) -> Reading:
    """The reading closest to that tick; readings are in order."""
    place = bisect_right([reading.allocations for reading in readings], tick)
    around = readings[max(0, place - 1) : place + 1]
    return min(around, key=lambda reading: abs(reading.allocations - tick))
