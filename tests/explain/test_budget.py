"""The step, divided: shares of one steady cycle, in milliseconds of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from stepscope.step.timeline import mean_budget

from .build import call, frame, kernel, memcpy, note, overhead, step

if TYPE_CHECKING:
    from stepscope.records.explanation import Budget

    from .conftest import Explain


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
