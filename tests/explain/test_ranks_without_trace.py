"""Ranks that recorded no trace: which belong to the job, and what is said about them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import stepscope
from stepscope.errors import NotCapturedError
from stepscope.explain.explain_job import explain_job
from stepscope.explain.incomplete_ranks import describe_untraced, is_rank_folder, split_attempts
from stepscope.explain.job.rank_part import MOST_CELLS, calls_of_run, empty_part, most_steps
from stepscope.explain.whole_run.account import measure_spread
from stepscope.records.job import LoggedCollectives
from stepscope.records.rank import RankWithoutTrace, StepColumns
from stepscope.records.run import RankRun
from stepscope.text.words import number_spans
from stepscope.trace.discover import find_job_files
from stepscope.ui.topics.explanation_json import explanation_json


def untraced(
    rank: int, *, world_size: int = 4, attempt: int = 1, **more: object
) -> RankWithoutTrace:
    run = RankRun(rank=rank, attempt=attempt, steps=10 + rank, warm_up=0, times=None)
    part = empty_part(rank=rank, world_size=world_size)
    given = {"path": f"rank-{rank:05d}", "part": part, "run": run, "mean_ms": None} | more
    return RankWithoutTrace(**given)  # type: ignore[arg-type]


@pytest.fixture
def two_ranks(golden: Path, tmp_path: Path) -> Path:
    """A real run of two ranks; rank 1 was not chosen for a trace."""
    folder = tmp_path / "run"
    shutil.copytree(golden / "cpu-two-ranks", folder)
    for name in ("trace.json.gz", "comms.jsonl", "memory.json"):
        (folder / "rank-00001" / name).unlink()
    file = folder / "rank-00001" / "rank.json"
    facts = json.loads(file.read_text()) | {"trace": {"chosen": False, "ranks": "listed"}}
    file.write_text(json.dumps(facts))
    return folder


def test_a_run_folder_has_traces_and_folders_without(two_ranks: Path) -> None:
    found = find_job_files(two_ranks)
    assert found.traces == [two_ranks / "rank-00000" / "trace.json.gz"]
    assert found.folders == [two_ranks / "rank-00001"]
    assert find_job_files(two_ranks / "rank-00000").folders == []


def test_one_traced_rank_is_explained_with_the_steps_of_both(two_ranks: Path) -> None:
    explanation = explain_job(two_ranks, cache=False)
    assert [rank.rank for rank in explanation.ranks] == [0]
    assert explanation.run is not None
    assert [run.rank for run in explanation.run.ranks] == [0, 1]
    assert all(run.times is not None for run in explanation.run.ranks)
    assert {note.id for note in explanation.quality} >= {"sampled-ranks"}
    assert not {note.id for note in explanation.quality} & {"missing-ranks", "missing-parts"}
    assert json.loads(json.dumps(explanation_json(explanation)["ranks_without_trace"])) == {
        "count": 1,
        "ranks": [[1, 1]],
        "why": "1 of 2 ranks were traced: --ranks lists the others",
    }


def test_every_surface_takes_a_job_with_one_traced_rank(two_ranks: Path, tmp_path: Path) -> None:
    explanation = stepscope.explain(two_ranks)
    assert "rank-00001" not in str(explanation)
    page = stepscope.write_report(explanation, tmp_path / "report.html").read_text()
    assert "1 of 2 ranks were traced" in page


def test_without_any_trace_the_steps_are_left_to_top(two_ranks: Path) -> None:
    (two_ranks / "rank-00000" / "trace.json.gz").unlink()
    with pytest.raises(NotCapturedError, match=r"`stepscope top .*` shows the steps"):
        explain_job(two_ranks, cache=False)


def test_a_damaged_folder_costs_no_other(two_ranks: Path) -> None:
    (two_ranks / "rank-00001" / "steps.jsonl").write_bytes(b"\0\xff{{{\n" * 9)
    (two_ranks / "rank-00001" / "clock.json").write_text("[]")
    explanation = explain_job(two_ranks, cache=False)
    assert [rank.rank for rank in explanation.ranks] == [0]


def test_peers_have_numbers_of_their_own_in_the_attempt_that_is_explained(golden: Path) -> None:
    traced = explain_job(golden / "cpu-two-ranks", cache=False).ranks  # ranks 0 and 1
    split = split_attempts(
        traced, [untraced(1), untraced(2), untraced(2), untraced(3), untraced(3, attempt=2)]
    )
    assert split.current == [0, 1]
    assert [rank.rank for rank in split.untraced] == [2, 3]
    assert [(run.rank, run.attempt) for run in split.others] == [(1, 1), (2, 1), (3, 2)]
    alone = split_attempts(traced, [untraced(2, world_size=1)])
    assert alone.untraced == []


def test_why_ranks_have_no_trace() -> None:
    lost = describe_untraced([untraced(1), untraced(2, rule="one-per-host")], traced=2)
    assert lost is not None
    assert lost.ranks == ((1, 2),)
    assert lost.why == (
        "2 of 4 ranks were traced: --ranks one-per-host; 1 trace could not be recorded"
    )
    assert describe_untraced([], traced=2) is None


def test_numbers_become_ranges() -> None:
    assert number_spans([7, 0, 1, 2, 2]) == [(0, 2), (7, 7)]
    assert number_spans([]) == []


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("rank-00003", True), ("rank-00003.2", True), ("rank-3.json", False), ("trace.json", False)],
)
def test_folders_of_ranks_are_known_by_their_names(name: str, is_one: bool) -> None:
    assert is_rank_folder(Path("/nowhere") / name) is is_one


def test_the_spread_of_the_mean_steps() -> None:
    means = {0: 10.0, 1: 10.05, 2: 12.0, 3: 11.0, 4: None}
    spread = measure_spread([], [untraced(rank, mean_ms=mean) for rank, mean in means.items()])
    assert spread is not None
    assert (spread.ranks, spread.fewest_steps, spread.most_steps) == (5, 10, 14)
    # The median of 10, 10.05, 11, 12 is 10.525; ranks over 10.63 are slow.
    assert (spread.least_mean_ms, spread.most_mean_ms) == (10.0, 12.0)
    assert spread.median_mean_ms == pytest.approx(10.525)
    assert spread.slowest == (2, 3)
    assert measure_spread([], [untraced(0)]) is None


# What a rank of a large job keeps of its collectives


def steps_of(count: int) -> StepColumns:
    number = np.arange(count)
    none = np.zeros(count, np.bool_)
    return StepColumns(
        number=number,
        wall_ns=np.full(count, 10_000_000),
        end_unix_ns=10**18 + (number + 1) * 10_000_000,
        phases_ns={"forward": np.full(count, 4_000_000)},
        window=none,
        memory=none,
        whole=~none,
    )


def log_of(steps: int, calls: int, name: str = "nccl:all_reduce") -> LoggedCollectives:
    """So many calls in each step, in two groups that take turns."""
    at = np.arange(steps)[:, None] * 10_000_000 + np.arange(1, calls + 1) * 100_000
    count = steps * calls
    return LoggedCollectives(
        groups=("0", "1"),
        names=(name,),
        group=np.arange(count, dtype=np.int32) % 2,
        name=np.zeros(count, np.int32),
        sequence=np.arange(count) // 2,
        created_ns=10**18 + at.ravel(),
    )


def test_of_every_step_the_first_and_the_last_call_of_each_group_stay() -> None:
    run = calls_of_run(log_of(100, 12), steps_of(100), world_size=100)
    assert run is not None
    assert len(run.steps) == 97  # the first three warm up
    assert np.bincount(run.number)[3:].tolist() == [4] * 97
    # Of step 3, calls 36 to 47 of the log: 36 and 46 in group 0, 37 and 47 in group 1.
    assert run.sequence[:4].tolist() == [18, 18, 23, 23]


def test_calls_that_everybody_waits_in_all_stay() -> None:
    run = calls_of_run(log_of(100, 12, "gloo:all_reduce"), steps_of(100), world_size=100)
    assert run is not None
    assert len(run) == 97 * 12


def test_of_a_long_run_stretches_stay_and_they_are_the_same_on_every_rank() -> None:
    steps, log = steps_of(20_000), log_of(20_000, 2)
    run = calls_of_run(log, steps, world_size=10_000)
    assert run is not None
    assert MOST_CELLS // 10_000 == most_steps(10_000) == 300
    assert 200 <= len(run.steps) <= 300
    assert len(run) == 2 * len(run.steps)
    stretches = np.unique(run.steps // 16)
    assert np.diff(stretches).max() < 3 * 20_000 / 16 / len(stretches)  # spread over the run
    fewer = calls_of_run(log, steps, world_size=12_000)
    assert fewer is not None
    assert set(fewer.steps.tolist()) <= set(run.steps.tolist())
