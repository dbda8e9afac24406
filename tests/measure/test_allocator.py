"""The allocator's account: a replayed history against a plain simulation, and a step on a tape.

The tape is a CPU stand-in for the CUDA caching allocator: it sees every storage come and go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepscope.measure.memory import memory_step as memory_module
from stepscope.measure.memory.allocator import (
    NO_POOLS,
    Allocator,
    Labels,
    PhaseTicks,
    PrivatePools,
    Reading,
    nearest,
    read_pools,
    replay,
)
from stepscope.measure.memory.memory_step import CATEGORIES, MemoryStep


def alloc(address: int, size: int) -> dict[str, Any]:
    return {"action": "alloc", "addr": address, "size": size}


def free(address: int, size: int) -> dict[str, Any]:
    return {"action": "free_requested", "addr": address, "size": size}


def test_replay_finds_the_top_and_who_held_it() -> None:
    labels = Labels()
    labels.add([("cuda:0", 1)], "activations", 11)  # seen after the first allocation
    labels.add([("cuda:0", 1)], "gradients", 13)  # another block at the same address, later
    events = [
        alloc(1, 100),  # 11: an activation
        alloc(2, 50),  # 12: nobody saw it
        free(2, 50),
        {"action": "segment_alloc", "addr": 9, "size": 1 << 20},
        free(7, 30),  # a gradient from before the step
        free(1, 100),
        {"action": "free_completed", "addr": 1, "size": 100},
        alloc(1, 40),  # 13: a gradient
    ]
    top = replay(
        events,
        start={"parameters": 200, "gradients": 30, "other": 5},
        owners={7: "gradients", 8: "parameters"},
        labels=labels,
        clock=10,
    )
    assert top.requested_bytes == 200 + 30 + 5 + 100 + 50
    assert top.allocations == 12
    assert top.categories == {
        "parameters": 200,
        "gradients": 30,
        "other": 5,
        "activations": 100,
        "temporaries": 50,
    }
    later = replay(events[2:], start={}, owners={}, labels=labels, clock=12)
    assert later.categories == {}  # only releases of what was there before, then less


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 1000)), max_size=60))
def test_replay_agrees_with_a_plain_simulation_and_adds_up(moves: list[tuple[int, int]]) -> None:
    """A move toggles an address: allocate it if free, else release it."""
    events, held = [], {100: 7}
    highest = 7
    for address, size in moves:
        if address in held:
            events.append(free(address, held.pop(address)))
        else:
            held[address] = size
            events.append(alloc(address, size))
        highest = max(highest, sum(held.values()))
    labels = Labels()
    labels.add([("cuda:0", 3)], "gradients", 2)
    labels.add([("cuda:0", 4)], "activations", 5)
    top = replay(events, start={"other": 7}, owners={}, labels=labels, clock=0)
    assert top.requested_bytes == highest
    assert sum(top.categories.values()) == highest
    assert min(top.categories.values()) >= 0


def test_phases_tell_in_which_one_an_allocation_was_made() -> None:
    phases = PhaseTicks()
    for name, tick in (("forward", 10), ("backward", 14), ("forward", 20), ("optimizer", 20)):
        phases.begin(name, tick)
    found = [phases.at(tick) for tick in (10, 11, 14, 15, 20, 21)]
    assert found == ["forward", "forward", "forward", "backward", "backward", "optimizer"]


def reading(allocations: int, allocated: int = 0) -> Reading:
    return Reading(
        allocated_bytes=allocated,
        reserved_bytes=allocated,
        requested_bytes=allocated,
        peak_bytes=allocated,
        allocations=allocations,
    )


def test_the_nearest_reading_is_the_nearest() -> None:
    readings = [reading(3), reading(10), reading(10), reading(20)]
    near = [nearest(readings, tick).allocations for tick in (0, 3, 6, 7, 14, 16, 99)]
    assert near == [3, 3, 3, 10, 10, 20, 20]


def test_counters_that_cannot_be_read_are_noted_once_and_left_alone() -> None:
    notes: set[str] = set()
    allocator = Allocator("cuda", [0], notes)
    allocator._module = object()
    assert allocator.read() is None
    assert allocator.read() is None
    assert [note for note in notes if "could not be read" in note] == list(notes)


class Tape(TorchDispatchMode):
    """Sees every storage that an operator makes, and its end."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self.alive: dict[int, int] = {}
        self.made = self.highest = 0

    @property
    def held(self) -> int:
        return sum(self.alive.values())

    def adopt(self, tensors: Any) -> None:
        """Storages from before the tape ran."""
        for tensor in tensors:
            self._see(tensor.untyped_storage(), quietly=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: Any, *, quietly: bool = False) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self.alive or not size:
            return
        self.alive[address] = size
        if not quietly:
            self.events.append(alloc(address, size))
            self.made += 1
        self.highest = max(self.highest, self.held)
        weakref.finalize(storage, self._gone, address)

    def _gone(self, address: int) -> None:
        self.events.append(free(address, self.alive.pop(address)))


class TapeAllocator(Allocator):
    """As the CUDA one, from the tape; 512 bytes are lost to rounding."""

    tape: Tape
    history = True

    def read_counters(self) -> Reading:
        held = self.tape.held
        return Reading(
            allocated_bytes=held + 512,
            reserved_bytes=1 << 20,
            requested_bytes=held,
            peak_bytes=self.tape.highest + 512,
            allocations=self.tape.made,
        )

    def start_history(self) -> None:
        self._recording = self.history
        self.tape.events.clear()

    def stop_history(self) -> Any:
        recorded, self._recording = self._recording, False
        return list(self.tape.events) if recorded else None


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    tape = Tape()
    allocator = type("ThisTape", (TapeAllocator,), {"tape": tape})
    monkeypatch.setattr(memory_module, "Allocator", allocator)
    return tape


BATCH, WIDE, INNER = 64, 16, 32


def train(
    optimizer: Any, loss_of: Callable[[], torch.Tensor], watch: MemoryStep | None = None
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of()
    for phase, run in (("backward", loss.backward), ("optimizer", optimizer.step)):
        if watch is not None:
            watch.phase(phase, entering=True)
        run()
        if watch is not None:
            watch.phase(phase, entering=False)
    return loss.detach()


def one_step(tape: Tape) -> tuple[dict[str, Any], int]:
    net = nn.Sequential(nn.Linear(WIDE, INNER), nn.Tanh(), nn.Linear(INNER, WIDE))
    optimizer = torch.optim.Adam(net.parameters(), foreach=False)
    x = torch.randn(BATCH, WIDE)

    train(optimizer, lambda: net(x).pow(2).sum())
    states = [t for state in optimizer.state.values() for t in state.values()]
    grads = [parameter.grad for parameter in net.parameters()]
    tape.adopt([*net.parameters(), *grads, *states, x])
    del grads
    with tape:
        watch = MemoryStep([optimizer])
        watch.begin()
        tape.highest = tape.held  # of this step alone
        train(optimizer, lambda: net(x).pow(2).sum(), watch)
        highest = tape.highest
        return watch.end(), highest


def test_a_step_on_the_tape_adds_up_to_its_peak(tape: Tape) -> None:
    result, highest = one_step(tape)
    peak = result["peak"]
    assert peak["allocated_bytes"] == highest + 512
    assert sum(peak["categories"].values()) == highest + 512
    assert tuple(peak["categories"]) == CATEGORIES
    assert peak["measured"] == "this step, from the allocator's history"
    count = WIDE * INNER + INNER + INNER * WIDE + WIDE
    held = peak["categories"]
    assert held["parameters"] == count * 4
    assert held["optimizer"] == 2 * count * 4 + 16
    assert held["other"] == BATCH * WIDE * 4 + 512  # the batch was there before; rounding
    assert held["temporaries"] > 0
    assert peak["phase"] == "backward"
    assert held["activations"] == BATCH * INNER * 4  # pow has had its input, tanh's result waits
    assert result["categories"]["temporaries"] == held["temporaries"]
    for row in result["phases"]:
        assert sum(row["categories"].values()) == row["allocated_bytes"]


def test_the_moment_with_most_of_what_grows_is_kept_beside_the_peak(tape: Tape) -> None:
    result, _ = one_step(tape)
    growing, peak = result["growing"], result["peak"]
    assert growing["phase"] in ("forward", "backward")
    assert sum(growing["categories"].values()) == growing["allocated_bytes"]
    assert growing["allocated_bytes"] <= peak["allocated_bytes"]
    most = sum(growing["categories"][name] for name in ("activations", "temporaries"))
    assert most >= sum(peak["categories"][name] for name in ("activations", "temporaries"))


def test_without_history_the_counter_is_used_and_said_to_be_what_it_is(
    tape: Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TapeAllocator, "history", False)
    result, highest = one_step(tape)
    peak = result["peak"]
    assert result["growing"] is None
    assert "rose in this step" in peak["measured"]
    assert peak["allocated_bytes"] == highest + 512
    assert sum(peak["categories"].values()) == highest + 512


def test_a_history_that_cannot_be_replayed_falls_back_to_the_counter(
    tape: Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TapeAllocator, "stop_history", lambda _: [{"action": "alloc"}])
    result, highest = one_step(tape)
    assert result["peak"]["allocated_bytes"] == highest + 512
    assert any("replaying the allocator: KeyError" in note for note in result["notes"])


# on a device


def big_step(optimizer: Any, net: nn.Module, watch: MemoryStep | None = None) -> torch.Tensor:
    return train(optimizer, lambda: net(torch.randn(256, 1024, device="cuda")).pow(2).mean(), watch)


def big() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(1024, 1024), nn.GELU())]
    net = nn.Sequential(*layers).cuda()
    return net, torch.optim.Adam(net.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_step_adds_up_to_the_allocators_own_peak() -> None:
    net, optimizer = big()
    for _ in range(3):
        big_step(optimizer, net)
    spike = torch.empty(1 << 28, device="cuda")  # an earlier peak, higher than any step's
    del spike
    before = torch.cuda.max_memory_allocated()
    watch = MemoryStep([optimizer])
    watch.begin()
    big_step(optimizer, net, watch)
    result = watch.end()
    assert torch.cuda.max_memory_allocated() == before  # not reset
    assert not torch._C._cuda_isHistoryEnabled()
    torch.cuda.reset_peak_memory_stats()
    big_step(optimizer, net)
    truth = torch.cuda.max_memory_allocated()
    peak = result["peak"]
    assert peak["measured"] == "this step, from the allocator's history", result["notes"]
    assert abs(peak["allocated_bytes"] - truth) <= 0.02 * truth
    assert sum(peak["categories"].values()) == peak["allocated_bytes"]
    count = sum(parameter.numel() for parameter in net.parameters())
    assert result["categories"]["parameters"] == 4 * count
    assert result["categories"]["gradients"] == 4 * count
    assert result["categories"]["optimizer"] == 8 * count
    # a GELU saves its input, a layer its own; the first layer's is the batch, pow saves the last
    assert result["categories"]["activations"] == 8 * 256 * 1024 * 4
    assert result["inputs_bytes"] == 256 * 1024 * 4
    for row in result["phases"]:
        assert sum(row["categories"].values()) == row["allocated_bytes"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_losses_are_the_same_bit_for_bit() -> None:
    def losses(*, watched: bool) -> list[torch.Tensor]:
        net, optimizer = big()
        seen = [big_step(optimizer, net) for _ in range(2)]
        watch = MemoryStep([optimizer]) if watched else None
        if watch is not None:
            watch.begin()
        seen.append(big_step(optimizer, net, watch))
        if watch is not None:
            watch.end()
        return [*seen, *(big_step(optimizer, net) for _ in range(2))]

    bare, seen = losses(watched=False), losses(watched=True)
    assert all(torch.equal(a, b) for a, b in zip(bare, seen, strict=True))


def test_replay_finds_the_moment_of_the_largest_weight() -> None:
    """The optimizer's copy is the step's peak; the loss's gradient grows with the batch."""
    labels = Labels()
    labels.add([("cuda:0", 1)], "activations", 1)
    events = [
        alloc(1, 100),  # 1: an activation
        alloc(2, 50),  # 2: the loss's gradient
        free(2, 50),
        free(1, 100),
        alloc(3, 400),  # 3: the optimizer's copy
        free(3, 400),
    ]
    given: dict[str, Any] = {"start": {"other": 7}, "owners": {}, "labels": labels, "clock": 0}
    assert replay(events, **given).allocations == 3

    def growing(clock: int, level: Mapping[str, int]) -> int:
        return 0 if clock == 3 else level.get("activations", 0) + level.get("temporaries", 0)

    moment = replay(events, **given, weigh=growing)
    assert moment.allocations == 2
    assert moment.categories == {"other": 7, "activations": 100, "temporaries": 50}
    assert moment.requested_bytes == 157


# Private pools of CUDA graphs count as what they hold.

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
