"""Arrivals of the whole run, joined over ranks."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.explain.job.late_ranks import join_arrivals, waits_by_step

from .calls import run_of

MS = 1_000_000


def late(*ms: float) -> np.ndarray:
    return np.array(ms) * MS


def test_lateness_is_against_the_median_and_the_wait_ends_with_the_last() -> None:
    runs = {rank: run_of(late(ms, ms)) for rank, ms in enumerate((0, 1, 2, 9))}
    arrivals = join_arrivals(runs)
    assert arrivals is not None
    assert arrivals.ranks == (0, 1, 2, 3)
    assert arrivals.number.tolist() == [3, 4]
    assert arrivals.late_ns[0].tolist() == [-1.5 * MS, -0.5 * MS, 0.5 * MS, 7.5 * MS]
    assert arrivals.wait_ns[1].tolist() == [9 * MS, 8 * MS, 7 * MS, 0]


def test_ranks_that_go_on_show_their_lateness_once_a_step() -> None:
    """DDP's buckets: a rank that is 4 ms late is so at each of them."""
    runs = {rank: run_of(late(ms, 0), calls_per_step=3) for rank, ms in enumerate((0, 0, 4))}
    arrivals = join_arrivals(runs)
    assert arrivals is not None
    assert arrivals.late_ns[:, 2].tolist() == [4 * MS, 0]


def test_ranks_that_wait_at_every_call_are_late_anew_at_each() -> None:
    runs = {
        rank: run_of(late(ms, 0), calls_per_step=3, blocking=True)
        for rank, ms in enumerate((0, 0, 4))
    }
    arrivals = join_arrivals(runs)
    assert arrivals is not None
    assert arrivals.late_ns[:, 2].tolist() == [12 * MS, 0]
    assert arrivals.wait_ns[:, 0].tolist() == [12 * MS, 0]


def test_only_steps_that_all_ranks_logged_are_joined() -> None:
    """Another number of steps, or a stretch that was not read."""
    runs = {0: run_of(np.zeros(10)), 1: run_of(np.zeros(8)), 2: run_of(np.zeros(8), first=5)}
    arrivals = join_arrivals(runs)
    assert arrivals is not None
    assert arrivals.number.tolist() == [5, 6, 7, 8, 9, 10]


def test_a_rank_whose_log_was_cut_is_left_out() -> None:
    runs = {0: run_of(np.zeros(100)), 1: run_of(np.zeros(100)), 2: run_of(np.zeros(10))}
    arrivals = join_arrivals(runs)
    assert arrivals is not None
    assert arrivals.ranks == (0, 1)
    assert len(arrivals.number) == 100


def test_each_rank_is_compared_within_its_own_group() -> None:
    pairs = {"a": (0, 1), "b": (2, 3)}
    runs = {
        rank: run_of(late(5.0 * (rank == 1), 0), groups=(name,))
        for name, ranks in pairs.items()
        for rank in ranks
    }
    arrivals = join_arrivals(runs)
    assert arrivals is not None
    assert arrivals.late_ns[0].tolist() == [-2.5 * MS, 2.5 * MS, 0, 0]


def test_ranks_that_share_nothing_are_not_joined() -> None:
    assert join_arrivals({0: run_of(np.zeros(5), groups=("a",)), 1: run_of(np.zeros(5))}) is None
    assert join_arrivals({0: run_of(np.zeros(5)), 1: run_of(np.zeros(5), first=50)}) is None


def test_waits_by_step() -> None:
    runs = {rank: run_of(late(0.0, 3.0 * rank)) for rank in (0, 1)}
    arrivals = join_arrivals(runs)
    assert arrivals is not None
    numbers, wait = waits_by_step(arrivals)[0]
    assert numbers.tolist() == [3, 4]
    assert wait.tolist() == [0, 3 * MS]
    assert waits_by_step(arrivals)[1][1].tolist() == [0, 0]


@pytest.mark.parametrize("twice", [0, 5])
def test_a_number_that_is_there_twice_counts_once(twice: int) -> None:
    sequence = np.arange(10)
    sequence[twice + 1] = twice
    runs = {0: run_of(np.zeros(10), sequence=sequence), 1: run_of(np.zeros(10), sequence=sequence)}
    arrivals = join_arrivals(runs)
    assert arrivals is not None
    assert len(arrivals.number) == 9
