"""Private pools of CUDA graphs count as what they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stepscope.measure.memory import memory_step as memory_module
from stepscope.measure.memory.allocator import (
    NO_POOLS,
    Allocator,
    Labels,
    PrivatePools,
    Reading,
    read_pools,
    replay,
)
from stepscope.measure.memory.memory_step import MemoryStep

MB = 1 << 20


def segment(address: int, size: int, pool: Any = (0, 1), **blocks: int) -> dict[str, Any]:
    """A segment of device 0; `live` and `asked` are bytes of one allocated block."""
    live = blocks.get("live", 0)
    listed = [{"size": size - live, "state": "inactive"}]
    if live:
        block = {"size": live, "requested_size": blocks.get("asked", live)}
        listed.append(block | {"state": "active_allocated"})
    row = {"address": address, "total_size": size, "device": 0, "blocks": listed}
    return row | {"segment_pool_id": pool}


def test_pools_are_the_segments_that_name_one() -> None:
    pools = read_pools(
        [
            segment(0, 4 * MB, (0, 0), live=MB),  # the shared pool
            segment(20 * MB, 6 * MB, (0, 1), live=MB, asked=1000),
            segment(40 * MB, 2 * MB, (0, 1)),
            segment(60 * MB, 2 * MB, (3, 0)),
            segment(80 * MB, 2 * MB, (0, 1)) | {"device": 1},
        ],
        devices=[0],
    )
    assert pools.sizes == {"0.1": 8 * MB, "3.0": 2 * MB}
    assert (pools.live_bytes, pools.requested_bytes) == (MB, 1000)
    inside = [address for address in range(0, 90 * MB, MB) if pools.hold(address)]
    expected = [*range(20, 26), *range(40, 42), *range(60, 62)]
    assert inside == [MB * place for place in expected]
    storages = {("cuda:0", 21 * MB): 5, ("cuda:0", 2 * MB): 7, ("cuda:0", 61 * MB): 11}
    assert pools.bytes_of(storages) == 16
    assert pools.kept_for([storages], activations=100) == (100, 10 * MB - 116)
    assert pools.kept_for([storages], activations=11 * MB) == (10 * MB - 16, 0)
    assert pools.content(7)["pools"][0] == {"pool": "0.1", "bytes": 8 * MB}


def test_without_pools_nothing_changes() -> None:
    assert not NO_POOLS.hold(0)
    assert NO_POOLS.content(0) == {}
    reading = Reading(
        allocated_bytes=5, reserved_bytes=9, requested_bytes=4, peak_bytes=6, allocations=1
    )
    assert reading.with_pools(NO_POOLS) == reading


def test_a_reading_counts_pools_as_what_they_hold() -> None:
    pools = PrivatePools({"0.1": 1000}, 300, 250, ((0, 1000),))
    reading = Reading(
        allocated_bytes=500, reserved_bytes=2000, requested_bytes=400, peak_bytes=0, allocations=1
    ).with_pools(pools)
    assert (reading.allocated_bytes, reading.requested_bytes) == (1200, 1150)
    assert reading.reserved_bytes == 2000


def test_what_happens_inside_a_pool_changes_no_level() -> None:
    pools = PrivatePools({"0.1": 100}, 0, 0, ((1000, 1100),))
    events = [
        {"action": "alloc", "addr": 1010, "size": 50},  # a graph's own
        {"action": "alloc", "addr": 5, "size": 7},
        {"action": "free_requested", "addr": 1010, "size": 50},
    ]
    start = {"temporaries": 100}
    top = replay(events, start=start, owners={}, labels=Labels(), clock=3, pools=pools)
    assert top.categories == {"temporaries": 107}
    assert top.allocations == 5


class GraphedAllocator(Allocator):
    """A device that holds the step's storages, and a pool with some of them."""

    pools = NO_POOLS
    held = 0

    def read_counters(self) -> Reading:
        return Reading(
            allocated_bytes=self.held,
            reserved_bytes=4 * self.held,
            requested_bytes=self.held,
            peak_bytes=self.held,
            allocations=1,
        )

    def _read_pools(self) -> PrivatePools:
        return self.pools


@pytest.mark.parametrize("activations", [0, 1, 2])
def test_a_graphed_step_adds_up_with_its_pool(monkeypatch: Any, activations: int) -> None:
    """Also where activations took the whole pool before a gradient took half of it."""
    net = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    gradient = net.weight.grad
    assert gradient is not None
    address, size = gradient.untyped_storage().data_ptr(), gradient.untyped_storage().nbytes()
    # The pool holds the weight's gradient, which is alive, and as much again for temporaries.
    pool = PrivatePools({"0.1": 2 * size}, size, size, ((address, address + size),))
    parameters = sum(p.numel() * 4 for p in net.parameters())
    fake = type("Fake", (GraphedAllocator,), {"pools": pool, "held": 2 * parameters})
    monkeypatch.setattr(memory_module, "Allocator", fake)
    step = MemoryStep([optimizer])
    step.begin()
    step._pooled = activations * size
    result = step.end()
    peak = result["peak"]
    assert sum(peak["categories"].values()) == peak["allocated_bytes"] == 2 * parameters + size
    assert peak["categories"]["gradients"] == parameters
    left = 0 if activations else size
    assert peak["categories"]["activations"] == size - left
    assert peak["categories"]["temporaries"] == left
    assert result["pools"] == [{"pool": "0.1", "bytes": 2 * size}]
    assert result["pools_unknown_bytes"] == left
    for phase in result["phases"]:
        assert sum(phase["categories"].values()) == phase["allocated_bytes"]
    assert not [note for note in result["notes"] if "did not come from" in note]


def test_a_graph_that_outlives_its_optimizer_still_has_an_account(monkeypatch: Any) -> None:
    """A replay calls no module; where the script let its optimizer go, only the device is left."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3000)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    asked = []

    def fake(kind: str, devices: list[int], notes: set[str]) -> GraphedAllocator:
        asked.append((kind, devices))
        return GraphedAllocator(kind, devices, notes)

    pool = PrivatePools({"0.1": 2000}, 1000, 1000, ((1 << 20, (1 << 20) + 2000),))
    monkeypatch.setattr(GraphedAllocator, "pools", pool, raising=False)
    monkeypatch.setattr(GraphedAllocator, "held", 3000, raising=False)
    monkeypatch.setattr(memory_module, "Allocator", fake)
    step = MemoryStep([])
    step.begin()
    result = step.end()
    assert asked == [("cuda", [1])]
    assert result["device"] == "cuda"
    peak = result["peak"]
    assert sum(peak["categories"].values()) == peak["allocated_bytes"]
    assert peak["categories"]["temporaries"] == 2000  # the pool
    assert "no module or optimizer was seen: their memory counts as other" in result["notes"]
