"""Waits between ranks carry the error of the clocks, and a wait below it is none."""

from __future__ import annotations

import numpy as np
import pytest

from jobs import Plan, make_job
from stepscope.explain.collective_waits import divide_unknown
from stepscope.explain.job.all_ranks import join_ranks
from stepscope.explain.job.arrivals import align_block
from stepscope.explain.job.late_ranks import _wait_errors
from stepscope.explain.whole_run.rank_run import explain_run
from stepscope.records.job import Clock, LastArriver
from stepscope.trace.matched_collectives import match_collectives
from stepscope.ui.topics.distributed import own_wait_words
from stepscope.ui.words import stall_time_words

from .whole_run.columns import columns, ns


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([0, 100], [100, 100]),
        ([0, 100, 30], [100, 130, 130]),  # the largest of another rank, and its own
        ([50, 50, 50], [100, 100, 100]),
        ([0, 0, 0], [0, 0, 0]),
    ],
)
def test_a_wait_is_off_by_its_ranks_error_and_the_largest_of_another(
    errors: list[int], expected: list[int]
) -> None:
    job = make_job(Plan(ranks=len(errors), steps=3))
    by_rank = dict(enumerate(errors))
    clock = Clock(aligned=True, reference=0, offset_ns=dict.fromkeys(by_rank, 0), error_ns=by_rank)
    for block in match_collectives(job.parts):
        waits = align_block(job.parts, block, clock).wait_error_ns
        assert (waits == np.array(expected)).all()
    assert _wait_errors({rank: float(ns) for rank, ns in by_rank.items()}) == dict(
        enumerate(map(float, expected))
    )


def test_every_row_with_a_wait_has_its_error() -> None:
    job = join_ranks(make_job(Plan(ranks=4, steps=4, rounds=50)).parts)
    rows = [row for row in job.collectives if row.wait_ns is not None]
    assert rows
    assert all(row.wait_error_ns for row in rows)
    assert all(row.wait_error_ns > 0 for row in job.arrivals)


@pytest.mark.parametrize(
    ("wait", "error", "words"),
    [
        (3_200_000, 100_000, "3.20 ms (±100 µs)"),
        (90_000, 100_000, "within ±100 µs"),
        (3_200_000, 0, "3.20 ms"),
    ],
)
def test_a_wait_in_words(wait: int, error: int, words: str) -> None:
    row = LastArriver(rank=0, times_last=0, of=1, lead_ns=0, waits_ns=wait, wait_error_ns=error)
    assert own_wait_words(row) == words


def test_a_stall_within_the_clocks_error_is_no_wait() -> None:
    """Step 40 stalls by 60 ms, of which 50 ms may be a wait."""
    wall = np.full(100, 30.0)
    wall[40] += 60
    run = explain_run(columns(wall))
    waits = np.full(100, 5.0)
    waits[40] = 55
    assert divide_unknown(run, np.arange(100), ns(waits), 51e6) is run
    (stall, _) = divide_unknown(run, np.arange(100), ns(waits), 4e6).stalls
    assert (stall.cause, stall.wait_error_ms) == ("collective", 4.0)
    assert stall_time_words(stall) == "50.0 ms (±4.00 ms)"
    (exact, _) = divide_unknown(run, np.arange(100), ns(waits)).stalls
    assert exact.wait_error_ms is None
    assert stall_time_words(exact) == "50.0 ms"
