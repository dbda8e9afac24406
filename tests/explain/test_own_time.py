"""One own time of each rank: the verdict on stragglers, the tables and the what-if agree on it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from jobs import Fault, Plan, make_job
from jobs_files import write_job
from stepscope.explain.explain_job import explain_job
from stepscope.explain.job.rank_part import own_ms, typical_step
from stepscope.explain.job.stragglers import find_stragglers
from stepscope.records.explanation import Explanation
from stepscope.records.job import RankSteps, RankTimes
from stepscope.text.figures import milliseconds
from stepscope.ui.terminal.explanation import _ranks
from stepscope.ui.terminal.health import check_health
from stepscope.ui.topics.explanation_json import explanation_json

MS = 1_000_000


def times(*own: float, step_ms: float = 20.0) -> tuple[RankTimes, ...]:
    return tuple(
        RankTimes(
            step_ms=step_ms, own_ms=ms, exposed_comm_ms=step_ms - ms, compute_ms=ms, input_ms=0.0
        )
        for ms in own
    )


def recorded(*own: float, steps: int = 6) -> Any:
    return np.repeat(np.array([own]) * MS, steps, axis=0).astype(np.int64)


def judged(own: Any, shown: tuple[RankTimes, ...]) -> Any:
    step = np.full_like(own, own.max())
    return find_stragglers(range(own.shape[1]), own, own * 0, step, (), shown)


def test_own_time_is_the_median_recorded_step_less_exposed_communication() -> None:
    """Steps of 10, 20, 12 ms of which 4, 4, 2 are exposed: own 6, 16, 10."""
    step, exposed = (np.array(ms, np.int64) * MS for ms in ((10, 20, 12), (4, 4, 2)))
    pace = RankSteps(
        number=np.arange(3), start_ns=np.cumsum(step) - step, dur_ns=step, compute_ns=step // 2,
        exposed_comm_ns=exposed, input_ns=step * 0,
    )  # fmt: skip
    assert typical_step(pace) == RankTimes(
        step_ms=12.0, own_ms=10.0, exposed_comm_ms=2.0, compute_ms=6.0, input_ms=0.0
    )


def test_slowdown_and_cost_are_of_the_own_times_that_are_shown() -> None:
    (found,) = judged(recorded(30, 20, 20), times(18, 12, 12)).ranks
    assert (found.rank, found.slowdown, found.cost_ms) == (0, 1.5, 6.0)
    assert "1.5 times" in found.evidence[0]
    assert found.evidence[1] == "0% of the extra time is waiting for data"


def test_a_rank_that_is_shown_to_be_quicker_is_never_accused() -> None:
    """1.54 times as long step by step, while the table shows 7.89 against 14.11 ms."""
    found = judged(recorded(15.4, 10.0), times(7.89, 14.11))
    assert found.verdict == "not resolved"
    assert found.detail == (
        "rank 0 takes 54% longer than the others step by step, but -44% in its typical step"
    )


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> Explanation:
    folder = tmp_path_factory.mktemp("job")
    fault = Fault(cause="compute", size=1.5, place=2)
    write_job(folder, make_job(Plan(ranks=4, steps=6, noise=0.01, fault=fault)))
    return explain_job(folder, cache=False)


def test_json_health_and_terminal_show_the_same_own_time(explained: Explanation) -> None:
    own = {rank.rank: own_ms(rank) for rank in explained.ranks}
    answer = explanation_json(explained)
    assert {each["rank"]: each["own_ms"] for each in answer["ranks"]} == own
    by_step = np.array(answer["steps_by_rank"]["own_ns"])
    assert list(own.values()) == pytest.approx((np.median(by_step, axis=0) / 1e6).tolist())
    health = check_health(explained, [])
    assert {each["rank"]: each["own_ms"] for each in health.ranks} == own
    assert explained.job is not None
    assert [each.own_ms for each in explained.job.times] == list(own.values())  # the page's
    screen = io.StringIO()
    Console(file=screen, width=100).print(_ranks(explained.ranks))
    assert all(milliseconds(ms) in screen.getvalue() for ms in own.values())


def test_the_accused_is_the_rank_with_the_most_own_time(explained: Explanation) -> None:
    own = {rank.rank or 0: own_ms(rank) for rank in explained.ranks}
    assert explained.job is not None
    (slow,) = explained.job.stragglers.ranks
    others = float(np.median([ms for rank, ms in own.items() if rank != slow.rank]))
    assert slow.rank == max(own, key=lambda rank: own[rank]) == 2
    assert slow.slowdown == pytest.approx(own[2] / others)
    recorded = max(each.step_ms for each in explained.job.times)
    share = (own[2] - others) / recorded
    assert slow.cost_ms == pytest.approx(share * explained.budget.step_ms)
