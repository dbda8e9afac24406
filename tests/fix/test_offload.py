"""Offloading: what the link can take, when values come back, and that training stays exact.

There is no GPU here: a made-up link copies at once and writes down what it was asked.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from random_nets import same_bits
from saved_trainings import trained
from step_chains import chain
from torch import nn

from stepscope.fix import save_memory
from stepscope.fix.saved import plan_load as offload_offers
from stepscope.fix.saved.attach import saving_content
from stepscope.fix.saved.encodings import offload
from stepscope.fix.saved.encodings import offload as copy_waits
from stepscope.fix.saved.encodings.offload import CopyWaits
from stepscope.fix.saved.memory_model import backward_memory
from stepscope.fix.saved.plan_load import (
    PlanLoad,
    copy_stalls_ns,
    offered_values,
    offload_points,
    plan_load,
    with_offload,
)
from stepscope.fix.saved.planner import plan_step
from stepscope.fix.saved.save_plan import ENCODE, KEEP
from stepscope.fix.saved.selection import ValueSelection, select
from stepscope.fix.saved.step_record import OFFLOAD, HoldingOption, LinkSpeed, StepRecord
from stepscope.records.change_values import MemoryTarget

CPU = torch.device("cpu")
FAST = LinkSpeed(1e6, 1e6, 1)


@dataclass(slots=True)
class NotedLink:
    """`events` has `send`, `left`, `fetch`, `arrived` and `forgotten` with the number of each
    value."""

    events: list[tuple[str, int]] = field(default_factory=list)
    sent: int = 0

    def send(self, tensor: torch.Tensor) -> Any:
        self.sent += 1
        self.events.append(("send", self.sent))
        return self.sent, tensor.clone()

    def left(self, sent: Any) -> None:
        self.events.append(("left", sent[0]))

    def forgotten(self, sent: Any, fetched: Any, leaving: torch.Tensor | None) -> None:
        del fetched, leaving
        self.events.append(("forgotten", sent[0]))

    def fetch(self, sent: Any) -> Any:
        self.events.append(("fetch", sent[0]))
        return sent

    def arrived(self, fetched: Any) -> torch.Tensor:
        self.events.append(("arrived", fetched[0]))
        tensor: torch.Tensor = fetched[1]
        return tensor

    def speed(self) -> LinkSpeed:
        return FAST


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> NotedLink:
    monkeypatch.setattr(offload_offers, "LEAST_BYTES", 256)
    noted = NotedLink()
    gc.collect()
    monkeypatch.setitem(offload._LINKS, CPU, noted)
    return noted


def deep() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(64, 32)


def test_training_is_exact_and_values_come_back_before_they_are_read(link: NotedLink) -> None:
    plain = trained(*deep(), 4)
    model, x = deep()
    saver = save_memory(model)
    saved = trained(model, x, 4)
    saver.remove()
    assert same_bits(plain, saved)
    assert saver.plan is not None
    assert any(row.action == OFFLOAD for row in saver.plan.rows)
    assert saver.notes == []
    orders = {
        kind: [number for event, number in link.events if event == kind]
        for kind in ("send", "left", "fetch", "arrived")
    }
    assert sorted(orders["fetch"]) == sorted(orders["arrived"]) == orders["send"]
    assert sorted(orders["left"]) == orders["send"]
    for number in orders["send"]:
        life = [event for event, of in link.events if of == number]
        assert life == ["send", "left", "fetch", "arrived"]
    ahead = 0
    for event, number in link.events:
        if event == "arrived":
            later = [n for kind, n in link.events[: link.events.index((event, number))]
                     if kind == "fetch" and n < number]  # fmt: skip
            ahead += bool(later)
    assert ahead  # the next one was on its way before this one was read


def test_nothing_is_held_after_backward(link: NotedLink) -> None:
    model, x = deep()
    saver = save_memory(model)
    trained(model, x, 3)
    saver.remove()
    gc.collect()
    assert link.sent > 0
    offload.unpacked(0)
    assert not offload._OUTSTANDING


def test_a_pass_without_backward_fetches_nothing(link: NotedLink) -> None:
    model, x = deep()
    saver = save_memory(model)
    trained(model, x, 2)
    before = len([event for event, _ in link.events if event == "fetch"])
    model(x)
    gc.collect()
    assert len([event for event, _ in link.events if event == "fetch"]) == before
    assert "forgotten" in [event for event, _ in link.events]  # copies may still run
    saver.remove()


def test_without_a_link_it_is_not_offered() -> None:
    model, x = deep()
    saver = save_memory(model)
    trained(model, x, 2)
    saver.remove()
    assert saver.plan is not None
    assert not any(row.action == OFFLOAD for row in saver.plan.rows)


def heavy_chain(count: int, size_bytes: int, took_ns: int) -> StepRecord:
    """Every value is saved right after it is made; no operator may be repeated."""
    saved = list(range(1, count + 1))
    return chain([size_bytes] * (count + 1), ["heavy"] * count, saved, took_ns)


MEGABYTES = 4 << 20


def test_a_fast_link_takes_all_but_the_last() -> None:
    """A transfer takes a quarter of an operator; the last ones would not be over when 85% of
    forward are."""
    record = heavy_chain(10, MEGABYTES, MEGABYTES)
    offered = offered_values(replace(record, link=LinkSpeed(4.0, 4.0, 1)))
    assert offered == list(range(1, 9))


def test_a_slow_link_takes_as_many_as_fit_into_forward() -> None:
    """A transfer takes as long as three operators and a fourth part on top: two of ten fit."""
    record = heavy_chain(10, MEGABYTES, MEGABYTES)
    assert offered_values(replace(record, link=LinkSpeed(1 / 3, 1 / 3, 1))) == [1, 2]


def test_what_cannot_be_made_again_comes_first() -> None:
    """Room for two of ten; the first value could be made again, the next two not."""
    record = heavy_chain(10, MEGABYTES, MEGABYTES)
    first = replace(record.operators[0], refusal=None)
    record = replace(record, operators=(first, *record.operators[1:]))
    assert offered_values(replace(record, link=LinkSpeed(0.4, 0.4, 1))) == [2, 3]


def test_a_copy_costs_the_host_and_not_the_device() -> None:
    record = replace(with_offload(heavy_chain(10, MEGABYTES, MEGABYTES), FAST), on_host=False)
    (option,) = record.values[1].options
    load = plan_load(record, ValueSelection(encoded={1: option}), replaced=1)
    assert load == PlanLoad(device_ns=0, host_ns=FAST.host_ns)


def test_a_link_that_is_too_slow_takes_nothing() -> None:
    record = heavy_chain(10, MEGABYTES, MEGABYTES)
    assert offered_values(replace(record, link=LinkSpeed(0.05, 0.05, 1))) == []
    assert offered_values(replace(record, link=LinkSpeed(4.0, 0.01, 1))) == []
    assert with_offload(record, LinkSpeed(0.05, 0.05, 1)).values == record.values


def test_small_values_stay() -> None:
    record = heavy_chain(10, 1000, MEGABYTES)
    assert offered_values(replace(record, link=FAST)) == []


def test_values_are_fetched_as_late_as_they_arrive_in_time() -> None:
    """Operators of 4 ms forward and 8 ms backward, transfers of 5 ms: value 1 is saved after the
    first operator and needed 72 ms into backward; it is to be there a tenth earlier, so it is
    fetched 59.8 ms into it or just before."""
    record = heavy_chain(10, MEGABYTES, 4_000_000)
    speed = LinkSpeed(MEGABYTES / 4e6, MEGABYTES / 4e6, 0)
    points = offload_points(with_offload(record, speed), [1, 2])
    uses = record.uses
    read_ms = {v: 8 * (10 - uses[points[v].fetch_at].after) for v in points}
    assert read_ms == {1: 56, 2: 48}
    assert {v: uses[points[v].left_at].after for v in points} == {1: 3, 2: 4}


def test_a_recorded_pass_that_took_too_long_does_not_count() -> None:
    """Steps of 60 ms have a forward of 20, whatever the watched pass took: a link that needs 30 ms
    for a value takes none."""
    record = replace(heavy_chain(10, MEGABYTES, 10_000_000), measured_step_ns=60_000_000)
    assert offered_values(replace(record, link=LinkSpeed(MEGABYTES / 3e7, 1e3, 0))) == []
    assert offered_values(replace(record, link=LinkSpeed(MEGABYTES / 3e6, 1e3, 0))) != []


def test_the_peak_counts_values_that_are_back() -> None:
    record = with_offload(heavy_chain(10, MEGABYTES, MEGABYTES), LinkSpeed(4.0, 4.0, 0))
    memory = backward_memory(record, select(record, bytes_per_ns=0, segments=1))
    assert memory.saved_bytes == 2 * MEGABYTES  # the last values stay
    assert memory.peak_bytes == 3 * MEGABYTES  # one is read, two are on their way
    without = replace(record, values=tuple(replace(v, options=()) for v in record.values))
    plain = backward_memory(without, select(without, bytes_per_ns=0, segments=1))
    assert plain.saved_bytes == 10 * MEGABYTES


def test_offloading_is_an_action_and_a_level_of_its_own() -> None:
    record = with_offload(heavy_chain(10, MEGABYTES, MEGABYTES), LinkSpeed(4.0, 4.0, 0))
    planned = plan_step(record, MemoryTarget())
    # The first value is the last that backward reads: by then there is room for it.
    assert [row.action for row in planned.plan.rows] == [KEEP, *[OFFLOAD] * 7, KEEP, KEEP]
    assert {use.action for use in planned.plan.uses} == {ENCODE, KEEP}
    assert planned.plan.timeline is not None
    before = planned.plan.timeline.before_bytes
    assert {action: max(line) for action, line in before.items()} == {
        OFFLOAD: 7 * MEGABYTES,
        KEEP: 3 * MEGABYTES,
    }
    memory = backward_memory(record, select(record, bytes_per_ns=0, segments=1))
    assert max(memory.offload_levels) == 3 * MEGABYTES
    assert max(memory.again_levels) == max(memory.encoded_levels) == 0
    assert max(memory.levels) == planned.plan.peak_bytes


def test_a_larger_batch_is_offloaded_with_the_plan_of_the_first(link: NotedLink) -> None:
    model, x = deep()
    twice = torch.cat([x, x.neg()])
    plain = [*trained(model, x, 4), *trained(model, twice, 4)]
    model, x = deep()
    saver = save_memory(model, batch="2x")
    first = trained(model, x, 4)
    sent = link.sent
    saved = [*first, *trained(model, twice, 4)]
    saver.remove()
    assert same_bits(plain, saved)
    assert link.sent > sent > 0
    assert saver.notes == []


def test_the_report_shows_what_was_offloaded(link: NotedLink) -> None:
    model, x = deep()
    saver = save_memory(model)
    trained(model, x, 4)
    saver.remove()
    content = saving_content(saver)
    assert link.sent > 0
    assert content is not None
    offloaded = next(entry for entry in content["actions"] if entry["action"] == OFFLOAD)
    assert offloaded["held_bytes"] == 0
    assert max(content["timeline"]["before_bytes"][OFFLOAD]) == offloaded["before_bytes"] > 0


def test_host_memory_of_earlier_steps_is_used_again() -> None:
    made = []

    def make(like: torch.Tensor) -> torch.Tensor:
        made.append(like.numel())
        return torch.empty_like(like)

    buffers = offload.PinnedBuffers(make)
    large, small = torch.zeros(8), torch.zeros(4)
    first, free = buffers.take(large)
    assert free is None
    buffers.give_back(first, "was read")
    assert buffers.take(small)[0] is not first
    again, free = buffers.take(large)
    assert again is first
    assert free == "was read"  # only then it may be written
    assert buffers.take(large)[0] is not first
    assert made == [8, 4, 8]


def with_sparse(record: StepRecord, *values: int) -> StepRecord:
    option = HoldingOption(encoding="sparse 0.1", held_bytes=100, cost_ns=10)
    changed = list(record.values)
    for number in values:
        changed[number] = replace(changed[number], options=(*changed[number].options, option))
    return replace(record, values=tuple(changed))


def test_answers_arrive_after_the_copies_that_were_sent_before() -> None:
    """Operators of 100 ns; a copy takes 250. The first is sent at 100 and the second at 200: they
    are over at 350 and 600. What asks at 400 waits for 200 ns; then it is 700, and nobody waits."""
    record = chain([1000] * 8, [None] * 7, list(range(8)), took_ns=100)
    record = replace(record, link=LinkSpeed(4.0, 4.0, 1), measured_step_ns=2100)
    packed = {use.value: use.after for use in record.uses}
    assert [packed[value] for value in (1, 2, 4, 5)] == [1, 2, 4, 5]
    assert copy_stalls_ns(record, {1, 2}, {4, 5}) == 200.0
    assert copy_stalls_ns(record, {1}, {4, 5}) == 0.0
    assert copy_stalls_ns(record, {4, 5}, {1, 2}) == 0.0
    assert copy_stalls_ns(replace(record, link=None), {1, 2}, {4, 5}) == 0.0


def test_the_time_that_copies_hold_up_encodings_counts() -> None:
    record = chain([1000] * 8, ["heavy"] * 7, list(range(8)), took_ns=100)
    record = replace(record, link=LinkSpeed(4.0, 4.0, 1), measured_step_ns=2100, on_host=False)
    away = HoldingOption(encoding=OFFLOAD, held_bytes=0, cost_ns=1)
    sparse = HoldingOption(encoding="sparse 0.1", held_bytes=100, cost_ns=10)
    both = ValueSelection(encoded={1: away, 2: away, 4: sparse})
    assert plan_load(record, both, 3).device_ns == 10 + 200
    assert plan_load(record, ValueSelection(encoded={1: away, 2: away}), 2).device_ns == 0


def test_where_copies_and_answers_would_hold_each_other_up_one_of_them_is_planned() -> None:
    """A step takes 12.6 us, of which a tenth is allowed. Both cost next to nothing by themselves;
    but two copies take 100 us, and an answer would wait for them."""
    record = chain([10**6] * 8, ["heavy"] * 7, list(range(8)), took_ns=600)
    record = replace(record, link=LinkSpeed(20.0, 20.0, 1), measured_step_ns=12_600, on_host=False)
    away = HoldingOption(encoding=OFFLOAD, held_bytes=0, cost_ns=1)
    values = list(record.values)
    for number in (1, 2):
        values[number] = replace(values[number], options=(away,))
    record = with_sparse(replace(record, values=tuple(values)), 3, 4)
    planned = plan_step(record, MemoryTarget(max_slowdown=0.1))
    assert planned.plan.changes_something()
    assert planned.waits != planned.offloads


class Moment:
    """An event of the device at a known time, in milliseconds."""

    def __init__(self, at_ms: float, *, over: bool = True) -> None:
        self.at_ms, self.over = at_ms, over

    def query(self) -> bool:
        return self.over

    def elapsed_time(self, later: Moment) -> float:
        return later.at_ms - self.at_ms


def test_only_copies_that_end_later_are_waited_for() -> None:
    waits = CopyWaits()
    waits.note(Moment(0.0), Moment(5.0))
    assert not waits.noting
    assert waits.waited_ns() == 0
    waits.begin()
    waits.note(Moment(1.0), Moment(3.5))
    waits.note(Moment(9.0), Moment(4.0))  # over long before
    waits.note(Moment(9.0), Moment(11.0, over=False))  # nobody knows yet
    assert waits.waited_ns() == 2_500_000
    waits.begin()
    assert waits.waited_ns() == 0
    waits.end()
    assert not waits.noting


def test_no_event_is_asked_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden:
        def query(self) -> bool:
            raise AssertionError("the capture would fail")

    waits = CopyWaits()
    waits.begin()
    waits.note(Forbidden(), Forbidden())
    monkeypatch.setattr(copy_waits, "is_capturing", lambda: True)
    assert waits.waited_ns() == 0
