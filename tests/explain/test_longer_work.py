"""Steps that take longer because the device has more to do in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stepscope.explain.budget import longer_work_ns
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.records.rank import RankInputs

from .build import kernel, op, step

if TYPE_CHECKING:
    from .build import Events
    from .conftest import Read


def work_of(read: Read, *, more: int, longer_us: float = 10.0, steps: int = 9) -> float:
    """Steps with four kernels of 10 us; every third one has `more`, and its own take longer."""
    events: Events = []
    for number in range(steps):
        at, is_longer = 1000.0 * number, number % 3 == 0
        events += step(number, start=at, dur=1000)
        for place in range(4 + more * is_longer):
            host = at + 20 + 40 * place
            dur = longer_us if is_longer else 10.0
            events += op("aten::relu", start=host, dur=20)
            events += kernel("work", start=host + 15, dur=dur, launched_at=host + 5)
    return longer_work_ns(RankAnalysis(RankInputs(trace=read(events))))


def test_what_a_longer_step_does_more(read: Read) -> None:
    assert work_of(read, more=5) == pytest.approx(50_000)


def test_steps_that_are_alike_do_nothing_more(read: Read) -> None:
    assert work_of(read, more=0) == 0


def test_the_same_kernels_that_took_longer_are_no_more_work(read: Read) -> None:
    """A slower device, or one that others use: that is a stall."""
    assert work_of(read, more=0, longer_us=25.0) == 0


def test_two_steps_tell_nothing(read: Read) -> None:
    assert work_of(read, more=5, steps=2) == 0
