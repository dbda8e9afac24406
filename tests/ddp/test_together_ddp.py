"""Buckets tuned, exchanged in turns and exchanged once, on real gloo ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope.fix.ddp.bucket_tuner import MOST_STEPS

SCRIPT = Path(__file__).with_name("together_ranks.py")
CHECKS = (
    "tuned_and_not",
    "decisions",
    "round_robin_of_any_ranks",
    "accumulation",
    "fixed_sizes",
    "refusals",
)


def run_ranks(folder: Path, ranks: int, *checks: str) -> list[dict[str, Any]]:
    """What the checks found on each rank."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(ranks), str(folder), *checks],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    errors = [process.communicate(timeout=170)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(errors)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(tmp_path_factory.mktemp("ranks"), 2, *CHECKS)


def assert_tuned_alike(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["same"]
    assert second["same"]
    assert first["steps"] <= MOST_STEPS < 60
    assert first["after"] == second["after"]
    assert first["buckets"] == second["buckets"]
    if first["after"] == "None":
        assert first["buckets"] == first["own_buckets"]


@pytest.mark.parametrize("options", ["small", "unused"])
def test_tuning_changes_no_loss_and_ends_in_time(found: list[dict[str, Any]], options: str) -> None:
    assert_tuned_alike([rank["tuned_and_not"][options] for rank in found])


@pytest.mark.slow
def test_tuning_changes_no_loss_of_views_and_static_graphs(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 2, "tuned_and_not_otherwise", "round_robin")
    for options in ("plain", "views", "static"):
        assert_tuned_alike([rank["tuned_and_not_otherwise"][options] for rank in found])
    for rank in found:
        assert rank["round_robin"]["same"]
        assert rank["round_robin"]["hook"].startswith("round_robin_hook")


def test_the_first_rank_alone_says_why(found: list[dict[str, Any]]) -> None:
    (report,) = found[0]["tuned_and_not"]["small"]["reports"]
    assert found[1]["tuned_and_not"]["small"]["reports"] == []
    assert report.startswith("stepscope: buckets ")
    for words in ("a bucket costs", "before: ", "ready", "exposed", "tried ", "predicted"):
        assert words in report


def test_the_fastest_stays_and_all_ranks_agree(found: list[dict[str, Any]]) -> None:
    many, few = (found[0]["decisions"][name] for name in ("many", "few"))
    assert found[1]["decisions"] == found[0]["decisions"]
    assert len(many["before"].split(",")) == len(few["before"].split(",")) == 2
    assert len(many["after"].split(",")) == max(many["tried"]) > 2
    assert len(few["after"].split(",")) == min(few["tried"]) == 1
    assert many["changed"]
    assert few["changed"]


def test_the_scripts_own_buckets_come_back(found: list[dict[str, Any]]) -> None:
    alike = found[0]["decisions"]["alike"]
    assert alike["before"] == alike["after"]
    assert not alike["changed"]
    assert alike["tried"]


def test_round_robin_sums_as_the_plain_path(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert set(rank["round_robin_of_any_ranks"].values()) == {True}


def test_accumulated_passes_equal_the_large_batch_and_are_exchanged_once(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        assert rank["accumulation"] == {
            "equal": True,
            "exchanges": 1,
            "left_on": True,
            "none": [],
        }


def test_sizes_can_be_set_without_tuning(found: list[dict[str, Any]]) -> None:
    layer = 4 * (64 * 64 + 64)
    for rank in found:
        same, buckets = rank["fixed_sizes"]["plain"]
        assert same
        sizes = [int(size) for size in buckets.split(",")]
        assert sum(sizes) == 6 * layer
        assert sizes[0] < layer  # one parameter fills the first bucket
        assert sizes[1] >= 42_000
        same, buckets = rank["fixed_sizes"]["unused"]
        assert same
        assert len(buckets.split(",")) == len(sizes)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("groups", "groups of the same ranks"),
        ("no group", "no process group"),
        ("interface", "no network interface none0"),
        ("one rank", "a single rank"),
        ("hook", "hook"),
        ("sparse", "sparse gradients"),
        ("size", "at least one byte"),
    ],
)
def test_what_cannot_be_done_is_said(found: list[dict[str, Any]], name: str, words: str) -> None:
    assert words in found[0]["refusals"][name]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_round_robin_has_the_plain_paths_bits_on_any_number_of_ranks(
    tmp_path: Path, ranks: int
) -> None:
    for rank in run_ranks(tmp_path, ranks, "round_robin_of_any_ranks"):
        assert set(rank["round_robin_of_any_ranks"].values()) == {True}
