"""What is made again is there one after the other, not all at once."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from step_chains import chain

from stepscope.fix.saved.encodings import Geometry
from stepscope.fix.saved.memory_model import BackwardMemory, backward_memory, step_memory
from stepscope.fix.saved.replay import (
    ArgumentPlace,
    CallResult,
    CallTemplate,
    KeptTensor,
    RepeatableCall,
)
from stepscope.fix.saved.selection import ValueSelection
from stepscope.fix.saved.step_record import (
    BackwardReading,
    HoldingOption,
    StepSurroundings,
)

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 1000


def made_again(memory: BackwardMemory) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Beside the batch: what is there while each node runs, and what passes before that."""
    there = tuple(max(0, level - BATCH) for level in memory.levels)
    levels = zip(memory.replay_levels, memory.levels, strict=True)
    return there, tuple(most - level for most, level in levels)


def test_a_chain_is_walked_with_two_values_at_a_time() -> None:
    """Of 10, 20, 30 and 40 bytes; only the last is read: 30 + 40, while 20 has gone."""
    record = chain([BATCH, 10, 20, 30, 40], [None] * 4, saved=[4])
    memory = backward_memory(record, ValueSelection(kept={0}, repeated={0, 1, 2, 3}))
    assert made_again(memory) == ((40, 0), (30, 0))
    assert memory.peak_bytes == BATCH + 70


def test_what_a_later_node_reads_stays_until_then() -> None:
    """The value of 10 bytes is read by the second node; that of 20 only on the way."""
    record = chain([BATCH, 10, 20, 30], [None] * 3, saved=[1, 3])
    memory = backward_memory(record, ValueSelection(kept={0}, repeated={0, 1, 2}))
    assert made_again(memory) == ((40, 10, 0), (20, 0, 0))


def test_what_a_node_reads_itself_is_there_until_it_ends() -> None:
    """The first node reads 20 and 30 bytes; 10 go when 20 are made."""
    record = chain([BATCH, 10, 20, 30], [None] * 3, saved=[2, 3])
    uses = tuple(replace(use, order=0) for use in record.uses)
    record = replace(record, uses=uses)
    memory = backward_memory(record, ValueSelection(kept={0}, repeated={0, 1, 2}))
    assert made_again(memory) == ((50, 0), (0, 0))


def test_what_is_encoded_is_decoded_for_the_operator_that_reads_it() -> None:
    """The value of 20 bytes is held in 5: when that of 30 is made of it, 20 are there as well, and
    have gone when the node runs."""
    record = chain([BATCH, 10, 20, 30], [None] * 3, saved=[3])
    option = HoldingOption(encoding="sparse", held_bytes=5, cost_ns=1)
    memory = backward_memory(record, ValueSelection(encoded={2: option}, repeated={2}))
    assert memory.levels == (35, 0)
    assert memory.replay_levels == (55, 0)
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
        readings = BackwardReading(None, 40, 40), BackwardReading(0, 40 + 10, 40 + works_with)
        around = step_memory(replace(record, readings=readings))
        assert around is not None
        assert around.peak_bytes(plain) == 40 + works_with
        assert around.peak_bytes(replayed) == peak


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
    held.call.add_user(0)
    assert held.unpack().tolist() == [3.0] * 4
    assert there == [0, 1, 1]


def repeatable(function: Callable[..., torch.Tensor], held: Any) -> RepeatableCall:
    """Of four numbers, made of what is held."""
    template = CallTemplate(function, (ArgumentPlace(0),), {}, None)
    return RepeatableCall(template, (held,), (0,), (4 * 4,))
