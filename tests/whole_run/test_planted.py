"""Training scripts with planted causes: what stepscope says against the scripts' own clocks.

Nothing here depends on how fast the machine is: script and stepscope see the same steps.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from whole_run.planted import TORCHRUN, PlantedRun, explain, run_planted, three_tries

# Findings that rest on a cause which nothing planted here shows by chance.
PLANTED = {
    "data-stalls", "evaluation-share", "checkpoint-share", "gc-pauses", "recompiles",
    "memory-growth", "allocator-retries",
}  # fmt: skip

OF_THE_RUN = {*PLANTED, "periodic-stall", "irregular-stalls", "slows-down"}


def near(value: float, tolerance: float) -> Any:
    return pytest.approx(value, rel=tolerance)


def check_sums(planted: PlantedRun) -> None:
    """The account adds up to the wall time, the budget to the mean step, the stalls to both."""
    for run in planted.ranks:
        account = run["account"]
        assert math.fsum(part["ms"] for part in account["parts"]) == near(account["wall_ms"], 1e-9)
        assert all(part["ms"] >= 0 for part in account["parts"])
        for part in account["parts"]:
            inner = math.fsum(part["ms"] for part in part["parts"])
            assert not part["parts"] or inner == pytest.approx(part["ms"], rel=1e-9, abs=1e-9)
        times = run["times"]
        costs = math.fsum(stall["cost_ms"] for stall in run["stalls"])
        assert times["typical_ms"] + costs == near(times["mean_ms"], 1e-9)
    budget = planted.explained["budget"]
    assert math.fsum(part["ms"] for part in budget["parts"]) == near(budget["step_ms"], 1e-9)
    assert math.fsum(part["share"] for part in budget["parts"]) == near(1.0, 1e-9)


def check_steps(planted: PlantedRun, own_mean_ms: float | None = None) -> None:
    """Every step was counted, and their mean is the script's own."""
    run = planted.run
    assert run["steps"] == planted.truth["steps"]
    mean = planted.explained["ranks"][0]["step_ms"]["mean"]
    # Two clocks around a loop on shared cores: the script's own reads a little more.
    assert mean == near(own_mean_ms or planted.own_mean_ms(), 0.05)
    assert mean == near(run["times"]["mean_ms"], 1e-9)
    assert planted.explained["budget"]["step_ms"] == near(mean, 1e-9)


def check_account(planted: PlantedRun) -> None:
    """Wall time is that of the command, and what lies inside steps is what the loop took."""
    account, truth = planted.run["account"], planted.truth
    assert account["wall_ms"] <= planted.command_ms
    inside = account["wall_ms"] - planted.account_ms("start_up", "shut_down")
    loop = math.fsum(truth["step_ms"]) + truth["after_ms"]
    first = truth["step_ms"][0]  # in part it is start-up: the first batch
    assert 0.95 * (loop - first) < inside < 1.05 * loop


def check(planted: PlantedRun) -> None:
    check_sums(planted)
    check_steps(planted)
    check_account(planted)


def leading(planted: PlantedRun) -> str:
    """The first finding about the run's steps. How busy this machine is comes on top of it."""
    ids = [finding["id"] for finding in planted.explained["findings"]]
    return next((name for name in ids if name in OF_THE_RUN), "none")


@pytest.mark.slow
@three_tries
def test_every_fourth_step_waits_for_four_workers(tmp_path: Path) -> None:
    planted = run_planted(tmp_path / "run", "slow_loader")
    check_sums(planted)
    check_steps(planted, planted.own_mean_ms("batch_ms"))
    check_account(planted)
    own = planted.planted_ms()
    assert leading(planted) == "data-stalls"
    assert planted.budget_ms("data_loading", "stall_data") == near(own, 0.10)
    assert planted.stall("data")["period"] == planted.truth["workers"]
    training = next(p for p in planted.run["account"]["parts"] if p["id"] == "training")
    (data,) = (part["ms"] for part in training["parts"] if part["id"] == "data")
    assert data == near(own * len(planted.steady()), 0.05)


@pytest.mark.slow
@three_tries
def test_evaluation_every_50_steps(tmp_path: Path) -> None:
    planted = run_planted(tmp_path / "run", "evaluates", "steps")
    check(planted)
    stall, truth = planted.stall("evaluation"), planted.truth
    assert leading(planted) == "evaluation-share"
    assert stall["cost_ms"] == near(planted.planted_ms(), 0.10)
    assert stall["period"] == 50
    whole = math.fsum(truth["planted_ms"]) + truth["after_ms"]
    assert planted.account_ms("evaluation") == near(whole, 0.05)


@three_tries
def test_evaluation_after_each_epoch_is_no_part_of_a_step(tmp_path: Path) -> None:
    planted = run_planted(tmp_path / "run", "evaluates", "epochs")
    own, truth = planted.planted_ms(), planted.truth
    check_sums(planted)
    check_account(planted)
    check_steps(planted, planted.own_mean_ms() - own)
    assert "evaluation-share" in planted.findings
    assert planted.stall("evaluation")["between_epochs_ms"] == near(own, 0.10)
    whole = math.fsum(truth["planted_ms"]) + truth["after_ms"]
    assert planted.account_ms("evaluation") == near(whole, 0.05)


@pytest.mark.slow
@three_tries
def test_evaluation_that_nothing_announces_is_a_periodic_stall(tmp_path: Path) -> None:
    planted = run_planted(tmp_path / "run", "evaluates", "no_grad")
    check(planted)
    stall = planted.run["stalls"][0]
    assert leading(planted) in ("evaluation-share", "periodic-stall")
    assert stall["period"] == 50
    assert stall["cost_ms"] == near(planted.planted_ms(), 0.10)


@pytest.mark.slow
@three_tries
def test_checkpoint_every_100_steps(tmp_path: Path) -> None:
    planted = run_planted(tmp_path / "run", "checkpoints")
    check(planted)
    stall = planted.stall("checkpoint")
    assert leading(planted) == "checkpoint-share"
    assert stall["cost_ms"] == near(planted.planted_ms(), 0.10)
    assert stall["period"] == 100
    own = math.fsum(planted.truth["planted_ms"])
    assert planted.account_ms("checkpoint") == near(own, 0.05)


@pytest.mark.parametrize("how", ["itself", pytest.param("by_hand", marks=pytest.mark.slow)])
@three_tries
def test_garbage_collection_of_many_objects(tmp_path: Path, how: str) -> None:
    planted = run_planted(tmp_path / "run", "collects_garbage", how)
    check(planted)
    assert leading(planted) == "gc-pauses"
    own = planted.planted_ms()
    assert planted.stall("gc")["cost_ms"] == near(own, 0.10)


@pytest.mark.slow
@three_tries
def test_a_compiled_model_meets_new_shapes(tmp_path: Path) -> None:
    planted = run_planted(tmp_path / "run", "recompiles")
    check(planted)
    own = planted.planted_ms()
    assert leading(planted) == "recompiles"
    assert planted.stall("compile")["cost_ms"] == near(own, 0.10)


@pytest.mark.slow
@three_tries
def test_kept_losses_grow_memory(tmp_path: Path) -> None:
    planted = run_planted(tmp_path / "run", "keeps_tensors")
    check(planted)
    growth = planted.run["memory_growth"]
    assert "memory-growth" in planted.findings
    assert growth["bytes_per_step"] == near(planted.truth["bytes_per_step"], 0.10)


@pytest.mark.slow
@three_tries
def test_a_step_that_doubles_after_step_300(tmp_path: Path) -> None:
    planted = run_planted(tmp_path / "run", "doubles")
    check(planted)
    steps, planned = planted.truth["step_ms"], planted.truth["change"]
    changes = planted.run["changes"]
    largest = max(changes, key=lambda level: level["after_ms"] / level["before_ms"])
    assert "slows-down" in planted.findings
    assert largest["low"] - 10 <= planned <= largest["high"] + 10
    # A busy machine may add changes of its own: compare between the neighbouring ones.
    edges = [planted.run["warm_up"], *(change["step"] for change in changes), len(steps)]
    place = edges.index(largest["step"])
    before = statistics.median(steps[edges[place - 1] : largest["step"]])
    after = statistics.median(steps[largest["step"] : edges[place + 1]])
    assert largest["after_ms"] / largest["before_ms"] == near(after / before, 0.10)


@pytest.mark.slow
@three_tries
def test_steps_that_vary_with_their_tokens_are_explained_by_them(tmp_path: Path) -> None:
    planted = run_planted(tmp_path / "run", "lengths_vary")
    check(planted)
    inputs, tokens = planted.run["inputs"], planted.truth["tokens"]
    assert inputs["explained"] > 0.5
    steady = [tokens[place] for place in planted.steady()]
    assert min(steady) <= inputs["fewest"] <= inputs["most"] <= max(steady)
    assert not PLANTED & {*planted.findings}


@three_tries
def test_nothing_planted_nothing_found(tmp_path: Path) -> None:
    planted = run_planted(tmp_path / "run", "healthy")
    check(planted)
    assert not PLANTED & {*planted.findings}
    assert planted.run["memory_growth"] is None


@pytest.mark.slow
@three_tries
def test_logging_every_25_steps(tmp_path: Path) -> None:
    planted = run_planted(tmp_path / "run", "logs")
    check(planted)
    stall = planted.stall("logging")
    waits = {stall["cause"]: stall["cost_ms"] for stall in planted.run["stalls"]}
    assert leading(planted) == "periodic-stall"
    assert stall["period"] == 25
    # On a busy machine the same lines also wait for a core, and so do others.
    cost, for_cores = stall["cost_ms"], waits.get("operating_system", 0.0)
    assert 0.9 * planted.planted_ms() - for_cores <= cost <= 1.1 * planted.planted_ms()


def test_a_job_of_one_step_says_that_it_is_too_short(tmp_path: Path) -> None:
    planted = run_planted(tmp_path / "run", "one_step")
    done = explain(planted.folder)
    assert "Traceback" not in planted.said + done.stderr
    assert done.returncode == 0 or "only 1 step was seen" in done.stderr


@pytest.mark.slow
def test_no_step_is_typical(tmp_path: Path) -> None:
    planted = run_planted(tmp_path / "run", "every_step_stalls")
    check(planted)
    assert not PLANTED & {*planted.findings}


@pytest.mark.slow
@three_tries
def test_one_rank_saves_and_the_other_waits(tmp_path: Path) -> None:
    planted = run_planted(
        tmp_path / "run", "rank_0_saves", launch=(*TORCHRUN, "--nproc-per-node=2")
    )
    check_sums(planted)
    own = planted.planted_ms(0)
    assert planted.stall("checkpoint", 0)["cost_ms"] == near(own, 0.10)
    # What the other rank's steps took longer, by its own clock, whenever rank 0 saved.
    steps, saved = planted.truths[1]["step_ms"], planted.truths[0]["planted_ms"]
    usual = statistics.median(steps)
    longer = [steps[place] - usual for place in planted.steady(1) if saved[place]]
    waited = math.fsum(longer) / len(planted.steady(1))
    # Steps of about 2 ms on shared cores vary as much themselves.
    assert planted.stall("collective", 1)["cost_ms"] == near(waited, 0.40)
    assert leading(planted) == "checkpoint-share"
    for rank, run in enumerate(planted.ranks):
        assert run["times"]["mean_ms"] == near(planted.own_mean_ms(rank=rank), 0.02)


@pytest.mark.slow
def test_a_restarted_job_has_two_attempts(tmp_path: Path) -> None:
    launch = (*TORCHRUN, "--nproc-per-node=1", "--max-restarts=1")
    planted = run_planted(tmp_path / "run", "restarts", launch=launch)
    check_sums(planted)
    attempts = sorted((run["rank"], run["attempt"], run["steps"]) for run in planted.ranks)
    assert attempts == [(0, 1, 50), (0, 2, 120)]
