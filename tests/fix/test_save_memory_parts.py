"""The pieces of save_memory alone: minimum cuts, encodings, and the peak of backward."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from step_chains import chain

from stepscope.fix.saved.memory_model import backward_memory
from stepscope.fix.saved.planner import make_plan
from stepscope.fix.saved.selection import (
    UNLIMITED,
    FlowNetwork,
    ValueSelection,
    keep_everything,
    select,
)
from stepscope.fix.saved.step_record import HoldingOption
from stepscope.records.change_values import MemoryTarget


def random_edges(seed: int, nodes: int) -> list[tuple[int, int, int]]:
    draw = random.Random(seed)
    pairs = [pair for pair in itertools.permutations(range(nodes), 2) if draw.random() < 0.4]
    return [(start, end, draw.randint(0, 9)) for start, end in pairs]


def cut_size(edges: list[tuple[int, int, int]], side: set[int]) -> int:
    return sum(room for start, end, room in edges if start in side and end not in side)


@pytest.mark.parametrize("seed", range(30))
def test_a_cut_is_as_small_as_the_best_of_all(seed: int) -> None:
    nodes = 7
    edges = random_edges(seed, nodes)
    network = FlowNetwork()
    for _ in range(nodes):
        network.node()
    for edge in edges:
        network.connect(*edge)
    side = network.source_side(0, nodes - 1)
    inner = range(1, nodes - 1)
    sides = [
        {0, *chosen}
        for count in range(nodes - 1)
        for chosen in itertools.combinations(inner, count)
    ]
    assert cut_size(edges, side) == min(cut_size(edges, one) for one in sides)


def test_a_cut_never_runs_through_an_unlimited_edge() -> None:
    network = FlowNetwork()
    source, middle, sink = (network.node() for _ in range(3))
    network.connect(source, middle, UNLIMITED)
    network.connect(middle, sink, 5)
    assert network.source_side(source, sink) == {source, middle}


def test_the_narrowest_place_of_a_chain_is_kept() -> None:
    """heavy -> 100, cheap -> 10, cheap -> 100, cheap -> 100: the last two are saved."""
    record = chain([5, 100, 10, 100, 100], ["heavy", None, None, None], [3, 4])
    selection = select(record, bytes_per_ns=0, segments=1)
    assert selection.kept == {2}
    assert selection.repeated == {2, 3}
    memory = backward_memory(record, selection)
    assert memory.saved_bytes == 10
    assert memory.peak_bytes == 210  # 4 is made from 3, which stays until its own use


def test_time_has_a_price() -> None:
    """Recomputing 3 and 4 saves 190 bytes and takes 20 ns."""
    record = chain([5, 100, 10, 100, 100], ["heavy", None, None, None], [3, 4])
    assert select(record, bytes_per_ns=9, segments=1).repeated == {2, 3}
    assert select(record, bytes_per_ns=11, segments=1).repeated == set()


def test_a_kept_value_goes_after_its_last_reader() -> None:
    record = chain([0, 100, 40], ["heavy", "heavy"], [1, 2])
    memory = backward_memory(record, keep_everything(record))
    assert (memory.saved_bytes, memory.peak_bytes) == (140, 140)


def test_a_long_chain_is_cut_into_segments() -> None:
    """Without segments the whole chain would be recomputed, and be there, at once."""
    count = 64
    record = chain([100] * (count + 1), [None] * count, list(range(1, count + 1)))
    at_once = backward_memory(record, select(record, bytes_per_ns=0, segments=1))
    assert at_once.saved_bytes == 100
    assert at_once.peak_bytes >= 100 * count
    plan = make_plan(record, MemoryTarget())
    assert plan.peak_bytes <= 100 * 3 * count**0.5
    assert plan.peak_bytes_before == 100 * count


def test_the_least_time_that_meets_a_target() -> None:
    count = 64
    record = chain([100] * (count + 1), [None] * count, list(range(1, count + 1)))
    some = make_plan(record, MemoryTarget(reduce=0.3))
    assert some.peak_bytes <= 0.7 * some.peak_bytes_before
    none = make_plan(record, MemoryTarget(max_slowdown=0.0))
    assert none.peak_bytes == none.peak_bytes_before
    assert none.repeated == ()


def test_following_a_plan_counts_as_time() -> None:
    record = chain([5, 100, 10, 100, 10, 100], ["heavy", None, None, "heavy", None], [3, 5])
    costly = replace(record, watch_ns=7, repeat_ns=5)
    assert make_plan(record, MemoryTarget()).extra_ns == 20
    plan = make_plan(costly, MemoryTarget())
    watched = len(plan.uses) + len(plan.operators)
    assert plan.extra_ns == 20 + watched * 7 + len(plan.repeated) * 5
    assert any("save_memory(model, compile=True)" in note for note in plan.notes)
    hidden = make_plan(replace(costly, slack_ns=40), MemoryTarget())
    assert hidden.extra_ns == plan.extra_ns - 40


def test_nothing_cheap_is_said() -> None:
    record = chain([0, 100, 40], ["heavy", "heavy"], [1, 2])
    plan = make_plan(record, MemoryTarget())
    assert plan.verdict() == "Backward needs 140 B. Nothing is changed."
    assert plan.notes == ("Nothing here is cheap to recompute or compresses exactly.",)
    assert backward_memory(record, ValueSelection()).saved_bytes == 0


def test_a_packed_value_is_there_packed_and_unpacked_while_it_is_read() -> None:
    """Three values of 100 bytes, each packed into 30."""
    record = chain([5, 100, 100, 100], ["heavy"] * 3, [1, 2, 3])
    packed = HoldingOption(encoding="sparse", held_bytes=30, cost_ns=1)
    values = (replace(value, options=(packed,)) for value in record.values)
    record = replace(record, values=tuple(values))
    memory = backward_memory(record, select(record, bytes_per_ns=0, segments=1))
    assert memory.saved_bytes == 90
    assert memory.levels[:3] == (190, 160, 130)
    assert memory.peak_bytes == 190
