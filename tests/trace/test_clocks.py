"""Clocks of made-up jobs, whose true offsets are known, are aligned within the error bars."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from jobs import PIPELINES, Job, Plan, draw_plan, make_job
from jobs_table import clock_errors
from stepscope.records.job import Clock, CollectiveCalls, RankPart

# Ranks, and how many jobs of that size a block has. Other blocks are other draws of the same:
# `make test-slow` has them.
JOBS = {2: 25, 4: 25, 8: 25, 64: 4, 1024: 1}
BLOCKS = [0, pytest.param(1, marks=pytest.mark.slow)]


def aligned(parts: list[RankPart]) -> Clock:
    from stepscope.trace.clocks import align_clocks

    return align_clocks(parts)


def wrong_clocks(ranks: int, block: int, **fixed: Any) -> list[str]:
    """A line for every job whose clock is not what it says it is."""
    out = []
    for seed in range(block * JOBS[ranks], (block + 1) * JOBS[ranks]):
        plan = draw_plan(seed, ranks, **fixed)
        job = make_job(plan)
        errors = clock_errors(job, aligned(job.parts))
        if errors:
            out.append(f"{plan}: {len(errors)} ranks, {errors[0]}")
    return out


@pytest.mark.parametrize("ranks", JOBS)
@pytest.mark.parametrize("block", BLOCKS)
def test_true_offsets_are_within_the_error_bars_without_rounds(ranks: int, block: int) -> None:
    wrong = wrong_clocks(ranks, block, rounds=0)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", [each for each in JOBS if each <= 512])
@pytest.mark.parametrize("block", BLOCKS)
def test_true_offsets_are_within_the_error_bars_with_rounds(ranks: int, block: int) -> None:
    wrong = wrong_clocks(ranks, block, rounds=50)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_strong_drift_is_followed(ranks: int) -> None:
    wrong = []
    for seed in range(20 if ranks < 64 else 4):
        plan = draw_plan(seed, ranks, drift_ppm=50.0, steps=20, compute_ns=300e6, form="ddp")
        job = make_job(plan)
        wrong += [f"{plan}: {each}" for each in clock_errors(job, aligned(job.parts))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", [2, 8])
def test_error_bars_are_no_wider_than_what_is_known(ranks: int) -> None:
    """Rounds of 50 µs there and back leave no more than that; collectives, their transfer."""
    for seed in range(10):
        plan = Plan(ranks=ranks, seed=seed, rounds=50, drift_ppm=10)
        clock = aligned(make_job(plan).parts)
        assert max(clock.error_ns.values()) < 100_000
        clock = aligned(make_job(replace(plan, rounds=0)).parts)
        assert max(clock.error_ns.values()) < 3_000_000  # 25 MB take 2.5 ms


@pytest.mark.parametrize("rounds", [0, 50])
def test_clocks_half_a_minute_apart_are_aligned(rounds: int) -> None:
    plan = Plan(ranks=4, offset_ns=30e9, rounds=rounds, drift_ppm=20)
    job = make_job(plan)
    assert np.ptp(job.clocks.offset_ns) > 10e9
    assert clock_errors(job, aligned(job.parts)) == []


@pytest.mark.parametrize("form", ["gpipe", "1f1b"])
def test_ranks_that_only_exchange_messages_are_bounded_from_both_sides(form: Any) -> None:
    """Forward messages bound one side, backward ones the other."""
    for seed in range(5):
        job = make_job(Plan(ranks=4, stages=4, form=form, seed=seed, offset_ns=5e9))
        assert clock_errors(job, aligned(job.parts)) == []


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
@pytest.mark.parametrize("rounds", [0, 50])
def test_a_clock_set_in_mid_window_aligns_nothing(ranks: int, rounds: int) -> None:
    for seed in range(6 if ranks < 64 else 2):
        jump = (-1) ** seed * 10 ** (8 + seed % 3 / 2)
        plan = draw_plan(seed, ranks, rounds=rounds, jump=(seed % ranks, jump))
        clock = aligned(make_job(plan).parts)
        assert not clock.aligned, plan
        assert clock.offset_ns == {}, plan
        assert clock.detail, plan


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_a_rank_of_another_run_aligns_nothing(ranks: int) -> None:
    for seed in range(6 if ranks < 64 else 2):
        plan = draw_plan(seed, ranks, rounds=0, form="ddp", broadcast=False)
        other = make_job(replace(plan, seed=seed + 1, compute_ns=1.7 * plan.compute_ns))
        parts = make_job(plan).parts
        parts[seed % ranks] = other.parts[seed % ranks]
        clock = aligned(parts)
        assert not clock.aligned, plan
        assert clock.detail, plan


def test_ranks_that_share_nothing_are_not_aligned() -> None:
    parts = make_job(Plan(ranks=2)).parts
    assert not aligned(parts[:1]).aligned
    assert not aligned([without_calls(part) for part in parts]).aligned
    assert not aligned([]).aligned


def test_a_rank_without_calls_is_left_out_and_the_others_are_aligned() -> None:
    job = make_job(Plan(ranks=4))
    clock = aligned([*job.parts[:3], without_calls(job.parts[3])])
    assert clock.aligned
    assert set(clock.offset_ns) == {0, 1, 2}
    assert "3" in clock.detail


def without_calls(part: RankPart) -> RankPart:
    return msgspec.structs.replace(part, calls=some_calls(part.calls, np.arange(0)), rounds=())


def some_calls(calls: CollectiveCalls, rows: Any) -> CollectiveCalls:
    """Of one rank's calls, only these rows."""
    columns = {name: getattr(calls, name) for name in calls.__struct_fields__}
    groups = columns.pop("groups")
    return CollectiveCalls(
        groups=groups, **{name: values[rows] for name, values in columns.items()}
    )


@pytest.mark.parametrize("tell_sequence", [True, False])
def test_windows_that_do_not_begin_at_the_same_call_are_matched(tell_sequence: bool) -> None:
    """A rank lacks its first step: counts, or the steps' numbers, tell which call is which."""
    for seed in range(5):
        job = make_job(Plan(ranks=4, seed=seed, tell_sequence=tell_sequence, offset_ns=20e9))
        job.parts[2] = later(job.parts[2], steps=1)
        assert clock_errors(job, aligned(job.parts)) == []


def later(part: RankPart, steps: int) -> RankPart:
    """As if the rank's window had begun some steps later."""
    calls = some_calls(part.calls, part.calls.step >= steps)
    pace = msgspec.structs.replace(
        part.pace,
        **{name: getattr(part.pace, name)[steps:] for name in part.pace.__struct_fields__},
    )
    calls = msgspec.structs.replace(calls, step=calls.step - np.int32(steps))
    return msgspec.structs.replace(part, calls=calls, pace=pace)


def test_a_thousand_ranks_are_aligned_in_seconds() -> None:
    job = make_job(Plan(ranks=1024, steps=10, drift_ppm=10))
    began = time.process_time()
    clock = aligned(job.parts)
    assert time.process_time() - began < 5
    assert clock_errors(job, clock) == []


def test_every_form_of_job_is_aligned() -> None:
    wrong = []
    for seed in range(12):
        for form in ("ddp", "tensor", "fsdp", "mixed", *PIPELINES):
            plan = draw_plan(seed, 8, form=form)
            job: Job = make_job(plan)
            wrong += [f"{plan}: {each}" for each in clock_errors(job, aligned(job.parts))]
    assert not wrong, "\n".join(wrong)
