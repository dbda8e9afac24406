"""The budget of a step."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from stepscope.explain.budget import longer_work_ns
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.records.explanation import Budget
from stepscope.records.rank import RankInputs
from stepscope.step.timeline import mean_budget

from .build import Events, call, frame, kernel, memcpy, note, op, overhead, step
from .conftest import Explain, Read

# The step, divided: shares of one steady cycle, in milliseconds of the step.


def shares(budget: Budget) -> dict[str, float]:
    return {part.id: part.share for part in budget.parts if part.share}


def test_every_part_of_a_cycle_is_a_share_of_it(explained: Explain) -> None:
    # One cycle of 200 µs from a's start (0) to c's (200):
    #   0-40 compute | 40-60 NCCL alone | 60-70 copy alone | 70-75 launch latency |
    #   75-85 compute | 85-135 queued long ago: other | 135-145 compute | 145-200 the host's:
    #   145-165 data loading, 165-175 sync, 175-180 profiler, 180-189 Python, 189-190 launch,
    #   190-200 Python
    rank = explained(
        step(1, start=-20, dur=160),
        step(2, start=140, dur=100),
        kernel("a", start=0, dur=40, launched_at=-10),
        kernel("ncclDevKernel_AllReduce", start=30, dur=30, stream=20, launched_at=-9),
        memcpy(start=50, dur=20, stream=21, launched_at=-8),
        kernel("b", start=75, dur=10, launched_at=-7),
        kernel("b", start=135, dur=10, launched_at=-6),
        note("data_loading", start=145, dur=20),
        call("cudaStreamSynchronize", start=165, dur=10),
        overhead("Buffer Flush", start=175, dur=5),
        kernel("c", start=200, dur=40, launched_at=189),
    )
    assert rank.budget.step_ms == 0.2
    assert rank.budget.basis == "cycles"
    assert shares(rank.budget) == pytest.approx(
        {
            "compute": 60 / 200,
            "exposed_comm": 20 / 200,
            "exposed_memory": 10 / 200,
            "data_loading": 20 / 200,
            "sync": 10 / 200,
            "operators": 1 / 200,
            "python": 19 / 200,
            "profiler": 5 / 200,
            "idle_launch": 5 / 200,
            "idle_other": 50 / 200,
        }
    )
    assert sum(part.share for part in rank.budget.parts) == pytest.approx(1, abs=1e-12)
    assert sum(part.ms for part in rank.budget.parts) == pytest.approx(0.2)


def test_without_cycles_the_budget_covers_the_window(explained: Explain) -> None:
    rank = explained(
        kernel("a", start=0, dur=40, launched_at=-10),
        kernel("b", start=50, dur=50, launched_at=-5),
    )
    assert rank.budget.basis == "window"
    assert rank.budget.step_ms == 0.1
    assert shares(rank.budget) == {"compute": 0.9, "idle_launch": 0.1}


def test_what_lies_outside_the_cycles_has_no_share(explained: Explain) -> None:
    # 100 µs copy before the first step, a long gap behind the last
    rank = explained(
        memcpy(start=-300, dur=100),
        step(1, start=0, dur=50),
        step(2, start=50, dur=50),
        kernel("a", start=10, dur=50, launched_at=1),
        kernel("a", start=60, dur=40, launched_at=51),
        kernel("b", start=900, dur=1, launched_at=99),
    )
    assert shares(rank.budget) == {"compute": 1.0}
    assert rank.timeline.span_ns == 1_201_000


def test_where_nothing_was_captured_no_share_is_claimed(explained: Explain) -> None:
    rank = explained(frame("train.py(1): main", start=0, dur=10), device=None)
    assert shares(rank.budget) == {}
    assert rank.budget.step_ms == 0
    assert rank.step_ms.profiled is None


def test_several_ranks_share_the_slowest_step(explained: Explain) -> None:
    fast = explained(
        kernel("a", start=0, dur=50, launched_at=-1), kernel("a", start=60, dur=40, launched_at=-1)
    )
    slow = explained(
        kernel("a", start=0, dur=50, launched_at=-1), kernel("a", start=70, dur=130, launched_at=-1)
    )
    budget = mean_budget((fast, slow))
    assert budget.step_ms == 0.2
    # 90% and 90% compute, 10% and 10% launch
    assert shares(budget) == pytest.approx({"compute": 0.9, "idle_launch": 0.1})
    mixed = mean_budget((fast, replace(slow, budget=replace(slow.budget, basis="cycles"))))
    assert mixed.basis == "window"


def test_a_rank_that_recorded_nothing_has_no_share(explained: Explain) -> None:
    busy = explained(
        kernel("a", start=0, dur=50, launched_at=-1), kernel("a", start=60, dur=40, launched_at=-1)
    )
    empty = explained(frame("train.py(1): main", start=0, dur=10), device=None)
    budget = mean_budget((empty, busy))
    assert budget == busy.budget
    assert sum(part.share for part in budget.parts) == pytest.approx(1)


# Steps that take longer because the device has more to do in them.


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
