"""Steps by the profiler's marks, else by optimizer steps, else the window; and their cycles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.records.explanation import Step
from stepscope.step.steps import step_of

from .build import AUTOGRAD, ZERO_NS, describing, kernel, note, op, step

if TYPE_CHECKING:
    from stepscope.records.explanation import RankExplanation

    from .conftest import Explain


def named(rank: RankExplanation) -> list[tuple[str, int, int]]:
    """(name, start, dur) in µs of the test's clock."""
    return [
        (each.name, (each.start_ns - ZERO_NS) // 1000, each.dur_ns // 1000)
        for each in rank.steps.steps
    ]


def window(rank: RankExplanation) -> tuple[int, int]:
    steps = rank.steps
    return (steps.window_start_ns - ZERO_NS) // 1000, (steps.window_end_ns - ZERO_NS) // 1000


def test_steps_are_the_profilers_marks_in_order_of_time(explained: Explain) -> None:
    rank = explained(
        step(5, start=100, dur=90),
        step(4, start=0, dur=95),
        kernel("a", start=10, dur=5, launched_at=5),
    )
    assert rank.steps.source == "profiler"
    assert named(rank) == [("ProfilerStep#4", 0, 95), ("ProfilerStep#5", 100, 90)]


def test_the_devices_copies_of_step_marks_are_not_steps(explained: Explain) -> None:
    rank = explained(
        step(4, start=0, dur=95),
        describing("gpu_user_annotation", "ProfilerStep#4", start=3, dur=80),
        kernel("a", start=10, dur=5, launched_at=5),
    )
    assert named(rank) == [("ProfilerStep#4", 0, 95)]


def test_a_cycle_runs_from_a_steps_first_work_to_the_next_steps(explained: Explain) -> None:
    # host    [step 1: 0-40]       [step 2: 40-80]      [step 3: 80-120]
    # device     a 50-90 (late: launched in step 1)  b 130-150   c 170-190
    rank = explained(
        step(1, start=0, dur=40),
        step(2, start=40, dur=40),
        step(3, start=80, dur=40),
        kernel("a", start=50, dur=40, launched_at=10),
        kernel("b", start=130, dur=20, launched_at=50),
        kernel("b", start=150, dur=10, launched_at=70),
        kernel("c", start=170, dur=20, launched_at=90),
    )
    assert rank.steps.cycles_ns == (80_000, 40_000)
    assert window(rank) == (50, 170)
    assert rank.step_ms.profiled == 0.060  # the median of 80 and 40 µs
    assert rank.budget.basis == "cycles"


def test_work_belongs_to_the_step_whose_host_range_launched_it(explained: Explain) -> None:
    """Also from another thread, and work launched before the first step is in no cycle."""
    rank = explained(
        kernel("warm-up", start=-20, dur=5, launched_at=-30),
        step(1, start=0, dur=40),
        step(2, start=40, dur=40),
        kernel("a", start=10, dur=5, launched_at=1),
        kernel("bwd", start=60, dur=5, launched_at=41, thread=AUTOGRAD),
    )
    assert rank.steps.cycles_ns == (50_000,)
    assert window(rank) == (10, 60)


def test_a_last_step_that_launched_nothing_does_not_cost_the_cycles(explained: Explain) -> None:
    rank = explained(
        step(1, start=0, dur=40),
        step(2, start=40, dur=40),
        step(3, start=80, dur=1),
        kernel("a", start=10, dur=5, launched_at=1),
        kernel("a", start=55, dur=5, launched_at=41),
    )
    assert rank.steps.cycles_ns == (45_000,)


def test_a_step_without_work_between_others_leaves_no_cycles(explained: Explain) -> None:
    rank = explained(
        step(1, start=0, dur=40),
        step(2, start=40, dur=40),
        step(3, start=80, dur=40),
        kernel("a", start=10, dur=5, launched_at=1),
        kernel("a", start=90, dur=5, launched_at=81),
    )
    assert rank.steps.cycles_ns == ()
    assert rank.budget.basis == "window"
    assert "no-cycle" in {note.id for note in rank.quality}


def test_one_step_is_the_window(explained: Explain) -> None:
    # the step's host range is 40 µs, its device work ends 95 µs after it began
    rank = explained(
        step(1, start=0, dur=40),
        kernel("a", start=10, dur=5, launched_at=1),
        kernel("b", start=20, dur=85, launched_at=2),
    )
    assert rank.steps.cycles_ns == ()
    assert window(rank) == (10, 105)
    assert rank.step_ms.profiled == 0.095


def test_without_marks_steps_lie_between_the_ends_of_optimizer_steps(explained: Explain) -> None:
    rank = explained(
        note("Optimizer.step#AdamW.step", start=30, dur=10),
        note("Optimizer.step#AdamW.step", start=80, dur=10),
        note("Optimizer.step#AdamW.step", start=140, dur=10),
        note("Optimizer.zero_grad#AdamW.zero_grad", start=45, dur=1),
        kernel("a", start=50, dur=5, launched_at=42),
        kernel("a", start=100, dur=5, launched_at=92),
    )
    assert rank.steps.source == "optimizer"
    assert [(start, dur) for _, start, dur in named(rank)] == [(40, 50), (90, 60)]
    assert rank.steps.cycles_ns == (50_000,)
    assert "no-step-marks" in {note.id for note in rank.quality}


def test_one_optimizer_step_bounds_nothing(explained: Explain) -> None:
    rank = explained(
        note("Optimizer.step#SGD.step", start=30, dur=10),
        kernel("a", start=50, dur=5, launched_at=42),
        kernel("a", start=60, dur=5, launched_at=43),
    )
    assert rank.steps.source == "window"
    assert window(rank) == (50, 65)
    assert rank.step_ms.profiled == 0.015


def test_without_a_device_cycles_are_the_steps_themselves(explained: Explain) -> None:
    rank = explained(
        step(1, start=0, dur=38),
        step(2, start=40, dur=50),
        op("aten::mm", start=5, dur=20),
        op("aten::mm", start=45, dur=20),
        device=None,
    )
    assert rank.steps.cycles_ns == (40_000, 50_000)
    assert window(rank) == (0, 90)


def test_steps_without_any_work_are_still_listed(explained: Explain) -> None:
    rank = explained(step(1, start=0, dur=38), step(2, start=40, dur=50), device=None)
    assert len(named(rank)) == 2
    assert rank.timeline.span_ns == 0
    shares = {part.id: part.share for part in rank.budget.parts if part.share}
    assert shares == {"python": 1.0}  # the steps are there and no operator runs in them


def test_step_of_a_time_is_the_range_that_holds_it() -> None:
    steps = (Step(name="1", start_ns=10, dur_ns=5), Step(name="2", start_ns=20, dur_ns=5))
    times = np.array([9, 10, 14, 15, 19, 20, 24, 25])
    assert step_of(steps, times).tolist() == [-1, 0, 0, -1, -1, 1, 1, -1]


def test_on_a_cpu_a_last_step_without_the_others_update_is_the_end_of_the_training(
    explained: Explain,
) -> None:
    def trained(number: int, start: float) -> list[list[dict[str, object]]]:
        update = note("Optimizer.step#SGD.step", start=start + 50, dur=10)
        return [step(number, start=start, dur=100), op("aten::mm", start=start, dur=40), update]

    whole = [*trained(1, 0), *trained(2, 100)]
    ended = explained(*whole, step(3, start=200, dur=7), op("aten::item", start=201, dur=1))
    assert ended.steps.cycles_ns == (100_000, 100_000)
    assert len(ended.steps.steps) == 3
    assert len(explained(*whole, *trained(3, 200)).steps.cycles_ns) == 3
