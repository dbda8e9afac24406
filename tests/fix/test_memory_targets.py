"""save_memory: targets, search and promise, with made-up records and with a real training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from stepscope.errors import UsageError
from stepscope.fix import save_memory
from stepscope.fix.saved import SavePlan, step_times
from stepscope.fix.saved.planner import make_plan, plan_step
from stepscope.fix.saved.step_promise import promise
from stepscope.fix.saved.step_record import (
    BackwardReading,
    RecordedCall,
    SavedUse,
    StepRecord,
    StepSurroundings,
    StepValue,
)
from stepscope.records.change_values import MemoryTarget, read_target, size_in_bytes

BLOCKS = 12
PRODUCT_NS, CHEAP_NS = 1000, 100
SIZE = 1000


def _value(number: int, *, owned: bool = False) -> StepValue:
    return StepValue(
        storage=number,
        size_bytes=SIZE,
        shape=(SIZE // 4,),
        dtype="float32",
        module="",
        producer=None,
        owned=owned,
        overwritten=False,
    )


def blocks(count: int = BLOCKS) -> StepRecord:
    """`count` times a product with a weight, then a cheap operator; backward reads the inputs of
    both. Value 0 is the batch, 1 to `count` are weights."""
    values = [_value(0), *(_value(1 + n, owned=True) for n in range(count))]
    calls, uses, last = [], [], 0
    for number in range(count):
        for name, refusal in (("mm", "heavy"), ("gelu", None)):
            weight = (1 + number,) if refusal else ()
            uses.append(
                SavedUse(
                    value=last,
                    after=len(calls),
                    shape=(SIZE // 4,),
                    dtype="float32",
                    consumer="",
                    order=len(uses),
                )
            )
            values.append(replace(_value(len(values)), producer=len(calls)))
            calls.append(
                RecordedCall(
                    name=name,
                    inputs=(last, *weight),
                    outputs=(len(values) - 1,),
                    took_ns=PRODUCT_NS if refusal else CHEAP_NS,
                    refusal=refusal,
                )
            )
            last = len(values) - 1
    return StepRecord(operators=tuple(calls), values=tuple(values), uses=tuple(uses))


def readings(*readings: tuple[int | None, int]) -> tuple[BackwardReading, ...]:
    """The use that was read, and the most that was allocated until the next."""
    return tuple(BackwardReading(use, 0, peak_bytes) for use, peak_bytes in readings)


def around(record: StepRecord, *, limit: int | None = None) -> StepRecord:
    """On a device: 5000 bytes stay, weights have no gradients yet."""
    saved = 2 * BLOCKS * SIZE
    facts = StepSurroundings(
        begun_bytes=5000,
        ended_bytes=5000 + saved + SIZE,
        gradient_bytes=BLOCKS * SIZE,
        limit_bytes=limit,
    )
    return replace(record, surroundings=facts)


def test_the_least_keeps_what_products_made_and_makes_one_value_again_at_a_time() -> None:
    plan = make_plan(blocks(), MemoryTarget())
    # The batch and the products' results stay; the inputs of eleven products are made again.
    assert plan.saved_bytes_before == 2 * BLOCKS * SIZE
    assert plan.saved_bytes == (BLOCKS + 1) * SIZE
    assert plan.extra_ns == (BLOCKS - 1) * CHEAP_NS


def test_a_slowdown_is_used_up_and_not_exceeded() -> None:
    record = blocks()
    allowed = 5 * CHEAP_NS / record.step_ns
    plan = make_plan(record, MemoryTarget(max_slowdown=allowed))
    assert plan.extra_ns <= 5 * CHEAP_NS
    assert plan.peak_bytes < plan.peak_bytes_before


def test_reduce_limits_the_peak_of_backward() -> None:
    record = around(blocks())
    plan = make_plan(record, MemoryTarget(reduce=0.3))
    assert plan.peak_bytes <= 0.7 * plan.peak_bytes_before


def test_the_steps_peak_counts_weights_gradients_and_what_a_node_works_with() -> None:
    plan = make_plan(around(blocks()), MemoryTarget(reduce=0.01))
    before = plan.step_peak_bytes_before
    assert before is not None
    # At the first node: all that is kept, one output, and the gradients of output and input.
    # Later what is kept goes as fast as gradients of weights come, every second node.
    assert before >= 5000 + SIZE + 2 * BLOCKS * SIZE + 2 * SIZE
    assert before <= 5000 + SIZE + 2 * BLOCKS * SIZE + 3 * SIZE
    assert plan.step_peak_bytes is not None
    assert plan.step_peak_bytes < before


def test_a_budget_is_of_the_whole_step_where_it_is_known() -> None:
    record = around(blocks())
    free = make_plan(record, MemoryTarget())
    assert free.step_peak_bytes is not None
    assert free.step_peak_bytes_before is not None
    budget = (free.step_peak_bytes + free.step_peak_bytes_before) // 2
    plan = make_plan(record, MemoryTarget(budget_bytes=budget))
    assert plan.step_peak_bytes is not None
    assert plan.step_peak_bytes <= budget
    assert 0 < plan.extra_ns <= free.extra_ns
    tight = make_plan(record, MemoryTarget(budget_bytes=6000))
    assert any("out of reach" in note for note in tight.notes)


def test_twice_the_batch_has_to_fit_into_the_device() -> None:
    record = around(blocks())
    peak = make_plan(record, MemoryTarget()).step_peak_bytes_before
    assert peak is not None
    ample = make_plan(around(blocks(), limit=4 * peak), MemoryTarget(batch=2.0))
    assert not ample.changes_something()
    assert any("fits as it is" in note for note in ample.notes)
    # Twice what grows beside what stays: 5000 bytes and at most all gradients.
    short = make_plan(around(blocks(), limit=int(1.45 * peak)), MemoryTarget(batch=2.0))
    assert short.changes_something()
    none = make_plan(around(blocks(), limit=peak // 2), MemoryTarget(batch=2.0))
    assert any("out of reach" in note for note in none.notes)


def test_without_an_allocator_twice_the_batch_has_to_fit_where_one_does_now() -> None:
    plan = make_plan(blocks(), MemoryTarget(batch=1.5))
    assert 1.5 * plan.peak_bytes <= plan.peak_bytes_before
    assert plan.extra_ns > 0


def test_the_timeline_shows_what_each_action_took() -> None:
    plan = make_plan(blocks(), MemoryTarget())
    line = plan.timeline
    assert line is not None
    together = [sum(levels) for levels in zip(*line.before_bytes.values(), strict=True)]
    assert max(together) == plan.saved_bytes_before
    assert max(line.before_bytes["recompute"]) == (BLOCKS - 1) * SIZE
    assert max(line.after_bytes) == plan.peak_bytes
    assert line.after_bytes[line.forward_points - 1] == plan.saved_bytes
    assert len(line.after_bytes) == len(together)


def test_a_promise_moves_readings_by_what_the_plan_changes() -> None:
    # Before the first node there are 50 000 bytes at most, after the last one 20 000.
    last = len(blocks().uses) - 1
    read = replace(around(blocks()), readings=readings((None, 50_000), (last, 40_000), (0, 20_000)))
    planned = plan_step(read, MemoryTarget())
    saved = planned.plan.saved_bytes_before - planned.plan.saved_bytes
    said = promise(planned, step_ns=1_000_000)
    assert said.peak_bytes_before == 50_000
    assert said.peak_bytes == 50_000 - saved
    assert said.peak_low_bytes < said.peak_bytes < said.peak_high_bytes
    assert said.step_ns == 1_000_000 + planned.plan.extra_ns
    assert said.step_low_ns < said.step_ns < said.step_high_ns
    assert said.whole_step
    assert "The step's peak goes from" in str(said)


def test_a_plan_serves_the_node_at_which_the_allocator_held_most() -> None:
    """What is made again for the last nodes does not help where the peak was seen at the first."""
    first_read = len(blocks().uses) - 1
    record = around(blocks())
    early = replace(record, readings=readings((None, 50_000), (first_read, 50_000), (0, 9_000)))
    late = replace(record, readings=readings((None, 20_000), (first_read, 20_000), (0, 90_000)))
    few_ns = CHEAP_NS * BLOCKS // 2
    target = MemoryTarget(max_slowdown=few_ns / record.step_ns)
    served = plan_step(early, target).plan
    assert served.step_peak_bytes is not None
    assert served.step_peak_bytes < 50_000
    nothing = plan_step(late, target).plan  # only the batch is kept when the last node runs
    assert nothing.step_peak_bytes == 90_000


def test_near_the_devices_memory_expandable_segments_are_advised() -> None:
    plain = around(blocks())
    needed = make_plan(plain, MemoryTarget()).step_peak_bytes or 0
    near, far = (around(blocks(), limit=round(needed / share)) for share in (0.9, 0.7))
    facts = near.surroundings
    assert facts is not None
    advised = [
        any("expandable_segments:True" in note for note in make_plan(record, MemoryTarget()).notes)
        for record in (near, far, replace(near, surroundings=replace(facts, expandable=True)))
    ]
    assert advised == [True, False, False]


def test_with_expandable_segments_a_larger_batch_may_use_more_of_the_device() -> None:
    record, target = around(blocks(), limit=60_000), MemoryTarget(batch=2.0)
    facts = record.surroundings
    assert facts is not None
    apart = make_plan(record, target)
    together = make_plan(replace(record, surroundings=replace(facts, expandable=True)), target)
    assert apart.extra_ns > together.extra_ns


def test_a_plan_says_why_it_uses_little_of_the_time() -> None:
    record = blocks()
    all_of_it = make_plan(record, MemoryTarget(max_slowdown=0.02))
    assert all_of_it.slowdown > 0.012
    assert not any("lowers the peak" in note for note in all_of_it.notes)
    little = make_plan(record, MemoryTarget(max_slowdown=5.0))
    assert "less than the 500% allowed" in little.notes[0]
    assert "heavy=True" in little.notes[0]
    heavy = make_plan(record, MemoryTarget(max_slowdown=5.0, heavy=True))
    assert "heavy=True" not in heavy.notes[0]


@pytest.mark.parametrize("late_bytes", [0, 12_000, 24_000])
def test_more_time_never_ends_with_a_higher_peak(late_bytes: int) -> None:
    """Also where the last node needs much itself, and what is made again for it comes on top."""
    record = around(blocks())
    last = len(record.uses) - 1
    reads = tuple((use, 20_000 if use else 20_000 + late_bytes) for use in range(last, -1, -1))
    read = replace(record, readings=readings((None, 50_000), *reads))
    peaks = [
        plan_step(read, MemoryTarget(max_slowdown=share)).plan.step_peak_bytes or 0
        for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]


def test_a_promise_without_readings_is_wider() -> None:
    planned = plan_step(blocks(), MemoryTarget())
    said = promise(planned)
    assert not said.whole_step
    assert not said.measured_step
    assert said.peak_bytes == planned.plan.peak_bytes
    assert said.step_high_ns - said.step_low_ns > 0.5 * said.step_ns_before


def test_a_dry_run_promises_before_anything_is_changed() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    model = nn.Sequential(*layers)
    saver = save_memory(model, dry_run=True)
    assert saver.promise is None
    for _ in range(5):
        model(torch.randn(32, 64)).sum().backward()
    said = saver.promise
    assert said is not None
    assert said.measured_step
    assert said.peak_bytes < said.peak_bytes_before
    assert saver.held_bytes is None
    assert saver.measured_step_ns is None
    assert saver.plan is not None
    assert SavePlan.from_json(saver.plan.to_json()) == saver.plan


def test_steps_with_the_plan_are_timed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    saver = save_memory(model, warmup=3)
    for _ in range(8):
        model(torch.randn(4, 8)).sum().backward()
    assert saver.plan is not None
    assert saver.plan.changes_something() == (saver.measured_step_ns is not None)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("max", MemoryTarget()),
        ("", MemoryTarget()),
        ("5%", MemoryTarget(max_slowdown=0.05)),
        ("0.5", MemoryTarget(reduce=0.5)),
        ("12GB", MemoryTarget(budget_bytes=12_000_000_000)),
        ("1.5gib", MemoryTarget(budget_bytes=3 << 29)),
        ("300B", MemoryTarget(budget_bytes=300)),
        ("2x", MemoryTarget(batch=2.0)),
        ("x2", MemoryTarget(batch=2.0)),
        ("15%+2x", MemoryTarget(max_slowdown=0.15, batch=2.0)),
        ("15%+heavy", MemoryTarget(max_slowdown=0.15, heavy=True)),
        ("heavy", MemoryTarget(heavy=True)),
        ("max + heavy", MemoryTarget(heavy=True)),
    ],
)
def test_targets_as_text(text: str, target: MemoryTarget) -> None:
    assert read_target(text) == target
    assert read_target(target.text) == target


@pytest.mark.parametrize(
    "text", ["many", "heavier", "5", "-1%", "0.5+0.6", "0GB", "0x", "1e9x", "nan", "%"]
)
def test_texts_that_are_no_targets(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|two limits"):
        read_target(text)


def test_sizes() -> None:
    assert size_in_bytes("500 MiB") == 500 << 20
    assert size_in_bytes(7) == 7
    assert size_in_bytes("1.2.3GB") is None
    assert size_in_bytes("-3GB") is None


@pytest.mark.parametrize("batch", ["twice", 0, -1, "0x"])
def test_a_batch_that_is_no_factor_is_refused(batch: str | float) -> None:
    with pytest.raises(UsageError, match="batch"):
        save_memory(nn.Linear(2, 2), batch=batch)


def test_a_larger_batch_follows_the_plan_of_the_first_one() -> None:
    results = []
    for save in (False, True):
        torch.manual_seed(0)
        layers = [part for _ in range(3) for part in (nn.Linear(32, 32), nn.GELU(), nn.Dropout())]
        model = nn.Sequential(*layers, nn.Linear(32, 1))
        saver = save_memory(model, batch="2x", budget=1, warmup=0) if save else None
        for rows in (8, 16, 16):
            model(torch.randn(rows, 32)).square().mean().backward()
        results.append([p.grad for p in model.parameters()])
    assert saver is not None
    assert saver.plan is not None
    assert saver.plan.changes_something()
    assert saver.notes == []
    # Twice the plan's, but for the constants of three masks.
    assert saver.held_bytes == 2 * saver.plan.saved_bytes - 3 * 4
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    again = SavePlan.from_json(saver.plan.for_other_shapes().to_json())
    assert again == saver.plan.for_other_shapes()


def test_a_captured_step_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = iter([10, 20, None, 50, 70])
    monkeypatch.setattr(step_times, "_mark", lambda _device: next(marks))
    watch = step_times.StepWatch()
    for _ in range(6):  # the first is left out: kernels are loaded in it
        watch.begins("batch", torch.device("cpu"))
    assert watch.step_ns("batch", step_times.PLAIN) == 15


def shared_source(layers: int) -> StepRecord:
    """A product's result of 1000 bytes that nobody keeps; each layer makes one value of it and of a
    small one that is kept anyway, and backward reads that value."""
    record = blocks(1)
    values = [_value(0), replace(_value(1), producer=0)]
    calls = [
        RecordedCall(name="mm", inputs=(0,), outputs=(1,), took_ns=PRODUCT_NS, refusal="heavy")
    ]
    uses = []
    for number in range(layers):
        values.append(replace(_value(len(values)), producer=len(calls)))
        calls.append(
            RecordedCall(
                name="add",
                inputs=(1,),
                outputs=(len(values) - 1,),
                took_ns=CHEAP_NS,
                refusal=None,
            )
        )
        uses.append(replace(record.uses[0], value=len(values) - 1, after=len(calls), order=number))
    return StepRecord(operators=tuple(calls), values=tuple(values), uses=tuple(uses))


@pytest.mark.parametrize("few", [8, 16, 32])
def test_a_few_layers_are_recomputed_where_only_a_few_are_allowed(few: int) -> None:
    """All of them start from one value that has to be kept for them, so one alone saves nothing."""
    record = shared_source(64)
    allowed = few * CHEAP_NS / record.step_ns
    plan = make_plan(record, MemoryTarget(max_slowdown=allowed))
    assert 0.5 * few * CHEAP_NS <= plan.extra_ns <= few * CHEAP_NS
    assert plan.saved_bytes <= (64 - few // 2 + 1) * SIZE
