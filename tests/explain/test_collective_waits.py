"""Waits of other ranks' making."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import stepscope
from jobs import Plan, make_job
from stepscope.explain.collective_waits import divide_unknown, without_window_waits
from stepscope.explain.job.all_ranks import join_ranks
from stepscope.explain.job.arrivals import align_block
from stepscope.explain.job.late_ranks import _wait_errors
from stepscope.explain.whole_run.rank_run import explain_run
from stepscope.records.explanation import Part, RankExplanation
from stepscope.records.job import Clock, LastArriver
from stepscope.records.run import STALL_CAUSES
from stepscope.trace.matched_collectives import match_collectives
from stepscope.ui.topics.distributed import own_wait_words
from stepscope.ui.words import stall_time_words

from .whole_run.columns import columns, ns

# A stall that nobody measured on this rank may be a wait for another one.


def test_unexplained_stalls_are_waits_where_the_rank_waited() -> None:
    """Steps 40 and 80 stall by 60 ms. In step 40 the rank waits for another one: 50 ms more than
    its usual 5."""
    wall = np.full(100, 30.0)
    wall[[40, 80]] += 60
    run = explain_run(columns(wall))
    waits = np.full(100, 5.0)
    waits[40] = 55
    divided = divide_unknown(run, np.arange(100), ns(waits))
    cost = {stall.cause: stall.cost_ms for stall in divided.stalls}
    assert cost == pytest.approx({"collective": 0.5, "unknown": 0.7})
    assert divided.times is not None
    assert divided.times.typical_ms + sum(cost.values()) == pytest.approx(divided.times.mean_ms)
    assert divided.series is not None
    names = [STALL_CAUSES[cause] for cause in divided.series.cause[[40, 80]]]
    assert names == ["collective", "unknown"]


def test_what_other_causes_explain_of_a_stall_stays_theirs() -> None:
    """Step 40 stalls by 60 ms: 20 ms without a core, 40 ms in a wait for another rank."""
    wall, without_core = np.full(100, 30.0), np.zeros(100)
    wall[40] += 60
    without_core[40] = 20
    run = explain_run(replace(columns(wall), cpu_wait_ns=ns(without_core)))
    waits = np.full(100, 5.0)
    waits[40] = 65
    divided = divide_unknown(run, np.arange(100), ns(waits))
    cost = {stall.cause: stall.cost_ms for stall in divided.stalls}
    assert cost == pytest.approx({"collective": 0.4, "operating_system": 0.2})


def test_a_rank_that_never_waited_longer_keeps_its_stalls() -> None:
    wall = np.full(100, 30.0)
    wall[40] += 60
    run = explain_run(columns(wall))
    assert divide_unknown(run, np.arange(100), ns(np.full(100, 5.0))) is run
    assert divide_unknown(run, np.arange(0), ns([])) is run


def test_waits_of_steps_that_were_not_seen_change_nothing() -> None:
    wall = np.full(100, 30.0)
    wall[40] += 60
    run = explain_run(columns(wall))
    assert divide_unknown(run, np.array([500, 501, 502]), ns([1, 1, 90])) is run


def test_stalls_with_a_known_cause_as_well_are_not_counted_twice() -> None:
    """Step 40 stalls by 60 ms, 20 of them for a checkpoint; the rank waits for another one in the
    rest of it. Step 80 stalls for a checkpoint most of all."""
    wall, checkpoint = np.full(100, 30.0), np.zeros(100)
    checkpoint[[40, 80]] = 20, 50
    wall[[40, 80]] += 60
    waits = np.full(100, 5.0)
    waits[[40, 80]] = 45
    run = explain_run(columns(wall, checkpoint=checkpoint))
    divided = divide_unknown(run, np.arange(100), ns(waits))
    cost = {stall.cause: stall.cost_ms for stall in divided.stalls}
    assert cost == pytest.approx({"checkpoint": 0.7, "collective": 0.5})
    assert divided.times is not None
    assert divided.times.typical_ms + sum(cost.values()) == pytest.approx(divided.times.mean_ms)


# A wait that only recorded steps have is no part of the step.

STEPS = np.arange(100)


@pytest.fixture
def ranks(golden: Path) -> tuple[RankExplanation, ...]:
    """Two ranks on a CPU, with steps of 20 ms: rank 0 is exposed for 12 of them, rank 1 for 2."""
    explanation = stepscope.explain(golden / "cpu-two-ranks")
    shares = ((0, {"compute": 0.3, "exposed_comm": 0.6, "data_loading": 0.1}),
              (1, {"compute": 0.8, "exposed_comm": 0.1, "data_loading": 0.1}))  # fmt: skip
    return tuple(
        replace(
            explanation.ranks[rank],
            budget=replace(
                explanation.ranks[rank].budget,
                step_ms=20.0,
                parts=tuple(Part(id=name, ms=20 * each, share=each) for name, each in of.items()),
            ),
        )
        for rank, of in shares
    )


def parts(rank: RankExplanation) -> dict[str, float]:
    return {part.id: part.ms for part in rank.budget.parts}


def test_the_step_keeps_the_transfer_and_what_plain_steps_wait(
    ranks: tuple[RankExplanation, ...],
) -> None:
    """Plain steps wait 1 ms, known to 0.2 ms; the rest of 12 ms is the rank's own work."""
    waits = {0: (STEPS, np.full(100, 1_000_000)), 1: (STEPS, np.zeros(100, np.int64))}
    first, second = without_window_waits(ranks, waits, {0: 200_000.0})
    assert parts(first) == pytest.approx(
        {"compute": 6 + 8.8, "exposed_comm": 2 + 1 + 0.2, "data_loading": 2}
    )
    assert sum(part.share for part in first.budget.parts) == pytest.approx(1.0)
    assert second == ranks[1]
    (finding,) = (one for one in first.findings if one.id == "exposed-communication")
    assert finding.share == pytest.approx(3.2 / 20)
    assert "16% of the step" in finding.summary


@pytest.mark.parametrize(
    ("wait_ms", "steps"), [(10, 100), (1, 5)], ids=["as long in plain steps", "few plain steps"]
)
def test_a_wait_that_plain_steps_have_too_stays(
    ranks: tuple[RankExplanation, ...], wait_ms: int, steps: int
) -> None:
    waits = {0: (STEPS[:steps], np.full(steps, wait_ms * 1_000_000))}
    assert without_window_waits(ranks, waits, {}) == ranks


# Waits between ranks carry the error of the clocks, and a wait below it is none.


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
