"""Jobs of some hundred ranks, made from a real capture of two: who is traced, counted and named."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

import long_run
from simulated_ranks import PER_HOST, Plan, host_name, planted, write_simulated
from stepscope import explain_job, write_report
from stepscope.explain.engines import Here, Pool
from stepscope.explain.explain_job import JobTraces
from stepscope.explain.incomplete_ranks import summarise_rank
from stepscope.explain.job.rank_part import MOST_CELLS, most_steps
from stepscope.records.explanation import Explanation
from stepscope.ui.topics.explanation_json import explanation_json

GOLDEN = Path(__file__).parent.parent / "golden" / "cpu-two-ranks"
RANKS, STEPS = 160, 130
# The capture has nine steps that can be repeated, so its two ranks differ more than most.
PLAN = replace(planted(RANKS, STEPS), rank_share=0.4, host_share=0.25)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many") / "job"
    write_simulated(GOLDEN, folder, PLAN)
    return folder


@pytest.fixture(scope="module")
def explained(job: Path) -> Explanation:
    return explain_job(job, cache=False)


def accused(explanation: Explanation) -> set[int]:
    """Ranks that are named, or that are on a host that is."""
    assert explanation.job is not None
    named = set()
    for one in explanation.job.stragglers.ranks:
        host = getattr(one, "host", None)
        on_host = {rank for rank, name in explanation.job.hosts.items() if name == host}
        named |= {one.rank} if one.rank is not None else on_host
    return named


def test_the_slow_rank_and_the_slow_host_are_named_and_nobody_else(explained: Explanation) -> None:
    assert PLAN.slow_host is not None
    first = PLAN.slow_host * PER_HOST
    assert accused(explained) == {PLAN.slow_rank, *range(first, first + PER_HOST)}


def test_every_rank_counts_and_64_are_listed(explained: Explanation) -> None:
    assert len(explained.ranks) == 64
    assert explained.job is not None
    assert explained.job.hosts == {rank: host_name(rank) for rank in range(RANKS)}
    assert explained.run is not None
    assert explained.run.spread is not None
    assert explained.run.spread.ranks == RANKS
    assert explained.run.spread.fewest_steps == explained.run.spread.most_steps == STEPS + 1
    assert {run.rank for run in explained.run.ranks} == {rank.rank for rank in explained.ranks}


def test_ranks_without_a_trace_are_no_missing_ranks(explained: Explanation) -> None:
    notes = {note.id: note for note in explained.quality}
    assert notes.keys().isdisjoint({"missing-ranks", "partial-groups", "missing-parts", "left-out"})
    assert notes["sampled-ranks"].count == RANKS - 64
    assert notes["sampled-ranks"].detail.startswith("64 of 160 ranks were traced: ")
    printed = explanation_json(explained)["ranks_without_trace"]
    listed = {rank for first, last in printed["ranks"] for rank in range(first, last + 1)}
    assert (printed["count"], len(listed)) == (96, 96)
    assert listed.isdisjoint({rank.rank for rank in explained.ranks})


def test_answer_and_report_stay_small(explained: Explanation, tmp_path: Path) -> None:
    assert len(json.dumps(explanation_json(explained)["run"])) < 64 * 12_000
    assert write_report(explained, tmp_path / "report.html").stat().st_size < 8_000_000


def test_both_engines_give_the_same_answer(job: Path, explained: Explanation) -> None:
    here = JobTraces([job], cache=False, engine=Here()).explain()[0]
    pool = JobTraces([job], cache=False, engine=Pool(2)).explain()[0]
    for name in ("stragglers", "run", "ranks_without_trace", "clock"):
        assert explanation_json(here)[name] == explanation_json(pool)[name]


def test_nobody_is_accused_when_all_are_even(tmp_path: Path) -> None:
    write_simulated(GOLDEN, tmp_path / "even", Plan(ranks=96, steps=100))
    explanation = explain_job(tmp_path / "even", cache=False)
    assert accused(explanation) == set()
    assert explanation.job is not None
    assert explanation.job.stragglers.source == "every step"


@pytest.mark.parametrize(("ranks", "steps"), [(65, 4000), (750, 4000), (1000, 3000), (10_000, 300)])
def test_all_ranks_together_keep_a_bounded_number_of_steps(ranks: int, steps: int) -> None:
    assert most_steps(ranks) == steps
    assert ranks * most_steps(ranks) <= MOST_CELLS


def test_a_long_run_of_a_large_job_comes_back_small(job: Path, tmp_path: Path) -> None:
    """10,000 ranks keep 300 steps each, whatever the run's length."""
    folder = tmp_path / "rank-00007"
    folder.mkdir()
    facts = json.loads((job / "rank-00001" / "rank.json").read_text())
    facts |= {"rank": 7, "world_size": 10_000, "steps": 25_000}
    (folder / "rank.json").write_text(json.dumps(facts))
    long_run.write_steps(folder / "steps.jsonl", 25_000, 100.0, seed=7)
    rank = summarise_rank(folder)
    assert not isinstance(rank, Exception)
    assert rank is not None
    assert (rank.rank, rank.run.steps, rank.run.series) == (7, 25_000, None)
    assert len(pickle.dumps(rank)) < 20_000
