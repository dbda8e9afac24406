"""What is made again is there one after the other, not all at once."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from step_chains import chain

from stepscope.fix.saved.encodings import Geometry
from stepscope.fix.saved.memory_model import backward_memory, step_memory
from stepscope.fix.saved.norm_recompute import FUSED
from stepscope.fix.saved.replay import (
    ArgumentPlace,
    CallResult,
    CallTemplate,
    KeptTensor,
    RepeatableCall,
    calls_among,
)
from stepscope.fix.saved.selection import ValueSelection
from stepscope.fix.saved.step_record import (
    HoldingOption,
    NodePeak,
    RecordedCall,
    StepRecord,
    StepSurroundings,
)

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 1000


def test_a_chain_is_walked_with_two_values_at_a_time() -> None:
    """Of 10, 20, 30 and 40 bytes; only the last is read: 30 + 40, while 20 has gone."""
    record = chain([BATCH, 10, 20, 30, 40], [None] * 4, saved=[4])
    memory = backward_memory(record, ValueSelection(kept={0}, repeated={0, 1, 2, 3}))
    assert memory.again_levels == (40, 0, 0)
    assert memory.passing_levels == (30, 0, 0)
    assert memory.peak_bytes == BATCH + 70


def test_what_a_later_node_reads_stays_until_then() -> None:
    """The value of 10 bytes is read by the second node; that of 20 only on the way."""
    record = chain([BATCH, 10, 20, 30], [None] * 3, saved=[1, 3])
    memory = backward_memory(record, ValueSelection(kept={0}, repeated={0, 1, 2}))
    assert memory.again_levels == (40, 10, 0, 0)
    assert memory.passing_levels == (20, 0, 0, 0)


def test_what_a_node_reads_itself_is_there_until_it_ends() -> None:
    """The first node reads 20 and 30 bytes; 10 go when 20 are made."""
    record = chain([BATCH, 10, 20, 30], [None] * 3, saved=[2, 3])
    uses = tuple(replace(use, order=0) for use in record.uses)
    record = replace(record, uses=uses)
    memory = backward_memory(record, ValueSelection(kept={0}, repeated={0, 1, 2}))
    assert memory.again_levels == (50, 0, 0)
    assert memory.passing_levels == (0, 0, 0)


def test_what_is_encoded_is_decoded_for_the_operator_that_reads_it() -> None:
    """The value of 20 bytes is held in 5: when that of 30 is made of it, 20 are there as well, and
    have gone when the node runs."""
    record = chain([BATCH, 10, 20, 30], [None] * 3, saved=[3])
    option = HoldingOption(encoding="sparse", held_bytes=5, cost_ns=1)
    memory = backward_memory(record, ValueSelection(encoded={2: option}, repeated={2}))
    assert memory.encoded_levels == (5, 0, 0)
    assert memory.again_levels == (30, 0, 0)
    assert memory.passing_levels == (20, 0, 0)
    assert memory.peak_bytes == 5 + 20 + 30


def test_what_passes_stands_beside_what_waits_for_the_node() -> None:
    """The node reads 40 bytes and works with 100, of which 10 are there before; while the 40 are
    made, 30 pass: 40 + 100, not 30 more. A node that works with 15 has its peak before it runs."""
    record = chain([BATCH, 10, 20, 30, 40], [None] * 4, saved=[4])
    facts = StepSurroundings(begun_bytes=0, ended_bytes=40, gradient_bytes=0, limit_bytes=None)
    record = replace(record, surroundings=facts)
    plain = backward_memory(record, ValueSelection(kept={4}))
    replayed = backward_memory(record, ValueSelection(kept={0}, repeated={0, 1, 2, 3}))
    for works_with, peak in ((100, BATCH + 40 + 100), (15, BATCH + 40 + 30 + 10)):
        readings = (NodePeak(None, 40, 40), NodePeak(0, 40 + works_with, begun_bytes=40 + 10))
        around = step_memory(replace(record, backward_peaks=readings), plain)
        assert around is not None
        assert around.peak_bytes(plain) == 40 + works_with
        assert around.peak_bytes(replayed) == peak


def residual_block(*, norm_is_read: bool = False) -> StepRecord:
    """Value 0 is a product's result of 100 bytes, 1 a residual; norm, sum and ReLU follow, each of
    100 bytes, and backward reads the last."""
    record = chain([100, 100, 100, 100, 100], [None] * 4, saved=[4])
    values = (
        record.values[0],
        replace(record.values[1], producer=None),
        *(replace(v, producer=n) for n, v in enumerate(record.values[2:])),
    )
    calls = (
        RecordedCall(
            name="norm", inputs=(0,), outputs=(2,), took_ns=1, refusal=None, again="shift"
        ),
        RecordedCall(name="add", inputs=(2, 1), outputs=(3,), took_ns=1, refusal=None, again=FUSED),
        RecordedCall(name="relu", inputs=(3,), outputs=(4,), took_ns=1, refusal=None, again=FUSED),
    )
    uses = record.uses
    if norm_is_read:
        uses = (replace(uses[0], value=2, order=0), *uses)
    return replace(record, values=values, operators=calls, uses=uses)


def test_what_is_made_with_a_norm_is_one_value() -> None:
    selection = ValueSelection(kept={0, 1}, repeated={0, 1, 2})
    assert backward_memory(residual_block(), selection).again_levels == (100, 0, 0)


def test_a_norm_that_backward_reads_is_made_by_itself() -> None:
    """Then the sum is made of it, and the ReLU of the sum."""
    selection = ValueSelection(kept={0, 1}, repeated={0, 1, 2})
    memory = backward_memory(residual_block(norm_is_read=True), selection)
    assert memory.again_levels == (200, 100, 0, 0)
    assert memory.passing_levels == (100, 0, 0, 0)


def test_replay_lets_go_of_what_nobody_reads_any_more() -> None:
    """Three operators in a row, of which the last result is asked for: when the third runs, the
    first result has gone."""
    made: list[weakref.ref[torch.Tensor]] = []
    there: list[int] = []

    def plus_one(tensor: torch.Tensor) -> torch.Tensor:
        there.append(sum(one() is not None for one in made))
        result = tensor + 1
        made.append(weakref.ref(result))
        return result

    held: KeptTensor | CallResult = KeptTensor(torch.zeros(4), 0)
    for _ in range(3):
        held = CallResult(repeatable(plus_one, held), 0, Geometry.of(torch.zeros(4)))
    assert isinstance(held, CallResult)
    held.call.add_user()
    assert held.unpack().tolist() == [3.0] * 4
    assert there == [0, 1, 1]


def repeatable(function: Callable[..., torch.Tensor], held: Any) -> RepeatableCall:
    """Of four numbers, made of what is held."""
    template = CallTemplate(None, (ArgumentPlace(0),), {}, None, quickest=[function])
    return RepeatableCall(template, (held,), (None,), (0,), (4 * 4,), calls_among([held]))
