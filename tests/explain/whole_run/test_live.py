"""A run that goes on: its status, its rates, and the same figures as after its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from live_runs import (
    BEGAN_NS,
    BEGAN_S,
    MS,
    alive,
    append_steps,
    as_text,
    gone,
    make_rows,
    write_rank,
    write_run,
    write_steps,
)
from stepscope.explain.whole_run.live import explain_live
from stepscope.explain.whole_run.rank_run import explain_run
from stepscope.records.run import LiveRun
from stepscope.trace.decode import Oddities
from stepscope.trace.run_folder.follow_run import RunFollower
from stepscope.trace.run_folder.step_files import read_step_columns

START_UP_S = 4.0
RANK = "rank-00000"


def look(folder: Path, now: float) -> LiveRun:
    return explain_live(RunFollower(folder).read(), now)


def begin(folder: Path, walls: list[float], **columns: list[Any]) -> float:
    """A run whose first step begins after START_UP_S; the time at which its last step ended."""
    write_run(folder, process=alive())
    write_rank(folder / RANK, process=alive())
    began_ns = BEGAN_NS + round(START_UP_S * 1e9)
    rows = make_rows(walls, began_ns=began_ns, **columns)
    write_steps(folder / RANK, rows)
    return float(rows[-1]["end_unix_ns"]) / 1e9


def test_an_empty_folder_is_starting_up(tmp_path: Path) -> None:
    run = look(tmp_path, BEGAN_S)
    assert (run.status, run.detail) == ("starting up", "no step has ended")
    assert run.ranks == ()
    assert run.spread is None


def test_a_command_without_a_step_is_starting_up(tmp_path: Path) -> None:
    write_run(tmp_path, process=alive())
    run = look(tmp_path, BEGAN_S + 7.5)
    assert (run.status, run.seconds) == ("starting up", 7.5)


def test_steps_that_come_are_training(tmp_path: Path) -> None:
    end = begin(tmp_path, [100.0] * 50)
    run = look(tmp_path, end + 0.5)
    assert (run.status, run.detail) == ("training", "the last step ended 500 ms ago")
    assert run.command == ("python", "train.py")
    (rank,) = run.ranks
    assert (rank.run.steps, rank.kept, rank.last_step) == (50, 50, 49)
    assert rank.quiet_s == pytest.approx(0.5, abs=1e-6)


def test_no_step_for_long_seems_to_hang(tmp_path: Path) -> None:
    end = begin(tmp_path, [1000.0] * 50)
    assert look(tmp_path, end + 19.0).status == "training"  # 20 medians
    run = look(tmp_path, end + 30.0)
    assert run.status == "seems to hang"
    assert run.detail == "no step for 30.0 s, 30 times the median step"


def test_a_pause_that_the_run_has_had_before_is_no_hang(tmp_path: Path) -> None:
    end = begin(tmp_path, [100.0] * 40 + [30_000.0] + [100.0] * 10)
    assert look(tmp_path, end + 80.0).status == "training"
    assert look(tmp_path, end + 100.0).status == "seems to hang"


def test_saving_a_window_is_no_hang(tmp_path: Path) -> None:
    end = begin(tmp_path, [100.0] * 40, window=[False] * 37 + [True] * 3)
    assert look(tmp_path, end + 60.0).status == "training"


@pytest.mark.parametrize(
    ("code", "status", "detail"),
    [
        (0, "finished", "the command ended with exit code 0"),
        (1, "failed", "the command ended with exit code 1"),
        (137, "killed", "the command ended with SIGKILL (exit code 137)"),
    ],
)
def test_a_run_that_was_closed_says_how_it_ended(
    tmp_path: Path, code: int, status: str, detail: str
) -> None:
    begin(tmp_path, [100.0] * 50)
    write_run(tmp_path, code=code, ended_s=BEGAN_S + 12)
    run = look(tmp_path, BEGAN_S + 1e6)
    assert (run.status, run.detail, run.exit_code) == (status, detail, code)
    assert run.seconds == 12
    assert run.has_ended


def test_a_run_that_nobody_closed_was_killed(tmp_path: Path) -> None:
    end = begin(tmp_path, [100.0] * 50)
    write_run(tmp_path, process=gone())
    write_rank(tmp_path / RANK, process=gone())
    run = look(tmp_path, end + 1e6)
    assert (run.status, run.detail) == ("killed", "stepscope run ended without closing the run")
    assert run.seconds == pytest.approx(START_UP_S + 5.0)  # not up to now


def test_ranks_that_outlive_stepscope_still_train(tmp_path: Path) -> None:
    end = begin(tmp_path, [100.0] * 50)
    write_run(tmp_path, process=gone())
    assert look(tmp_path, end + 1).status == "training"


@pytest.mark.parametrize("facts", [{"status": "finished"}, {"process": gone()}])
def test_processes_that_have_ended_before_their_command(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    end = begin(tmp_path, [100.0] * 50)
    write_rank(tmp_path / RANK, **facts)
    assert look(tmp_path, end + 100).status == "shutting down"


@pytest.mark.parametrize(
    ("facts", "status"),
    [({"status": "finished"}, "finished"), ({"process": gone()}, "killed")],
)
def test_a_script_that_captures_itself_has_no_run_json(
    tmp_path: Path, facts: dict[str, Any], status: str
) -> None:
    write_rank(tmp_path / RANK, **facts)
    write_steps(tmp_path / RANK, make_rows([100.0] * 20))
    run = look(tmp_path, BEGAN_S + 5)
    assert run.status == status
    assert run.seconds == 2.0


def test_a_silent_run_of_another_machine_is_unknown(tmp_path: Path) -> None:
    elsewhere = alive() | {"host": "elsewhere"}
    end = begin(tmp_path, [100.0] * 50)
    write_run(tmp_path, process=elsewhere)
    write_rank(tmp_path / RANK, process=elsewhere)
    assert look(tmp_path, end + 1).status == "training"
    run = look(tmp_path, end + 3600)
    assert run.status == "unknown"
    assert "cannot be seen from here" in run.detail


def test_rates_leave_out_the_step_that_holds_the_start_up(tmp_path: Path) -> None:
    """99 steps of 100 ms, then 40 of 400 ms: the last ten seconds hold 25 of those."""
    walls = [9_000.0] + [100.0] * 99 + [400.0] * 40
    begin(tmp_path, walls, first=[True] + [False] * 139)
    (rank,) = look(tmp_path, BEGAN_S + 60).ranks
    assert rank.steps_per_s == pytest.approx(139 / (9.9 + 16.0))
    assert rank.recent_steps_per_s == pytest.approx(2.5)


def test_figures_are_those_of_explain(tmp_path: Path) -> None:
    data = [40 * MS if step % 4 == 3 else MS for step in range(200)]
    begin(tmp_path, [20.0 + ns / MS for ns in data], data_ns=data)
    (rank,) = look(tmp_path, BEGAN_S + 60).ranks
    columns = read_step_columns(tmp_path / RANK, Oddities("steps.jsonl"))
    assert columns is not None
    after = explain_run(columns)
    assert rank.run.times == after.times
    assert rank.run.stalls == after.stalls
    (stall,) = rank.run.stalls
    assert (stall.cause, stall.steps, stall.period) == ("data", 50, 4)
    assert stall.cost_ms == pytest.approx(39 / 4)


def test_a_typical_step_is_divided_into_phases(tmp_path: Path) -> None:
    data = [900 * MS if step == 77 else 5 * MS for step in range(120)]
    begin(tmp_path, [20.0 + ns / MS for ns in data], data_ns=data, other_ns=[2 * MS] * 120)
    (rank,) = look(tmp_path, BEGAN_S + 60).ranks
    assert rank.phases_ms == pytest.approx({"data": 5.0, "forward": 18.0, "other": 2.0})


def test_goodput_is_steady_training_over_the_time_since_the_start(tmp_path: Path) -> None:
    """Ten seconds of steps, one of them the first, after four seconds of start-up."""
    end = begin(tmp_path, [100.0] * 100)
    (rank,) = look(tmp_path, end + 0.3).ranks
    assert rank.goodput == pytest.approx(9.9 / 14.0)
    assert rank.run.account is not None
    assert rank.run.account.wall_ms == pytest.approx(14_000)
    assert sum(part.ms for part in rank.run.account.parts) == pytest.approx(14_000)


def test_goodput_of_a_sample_is_about_the_same(tmp_path: Path) -> None:
    begin(tmp_path, [1.0] * 60_000)
    (rank,) = look(tmp_path, BEGAN_S + 70).ranks
    assert rank.kept < 60_000 == rank.run.steps
    assert rank.run.account is None
    assert rank.goodput == pytest.approx(60.0 / 64.0, rel=0.01)
    assert "a sample" in " ".join(look(tmp_path, BEGAN_S + 70).notes)


def test_a_job_of_one_step(tmp_path: Path) -> None:
    end = begin(tmp_path, [100.0], first=[True])
    run = look(tmp_path, end)
    (rank,) = run.ranks
    assert run.status == "training"
    assert (rank.run.steps, rank.run.times, rank.steps_per_s) == (1, None, None)


def test_ranks_with_different_counts_are_compared(tmp_path: Path) -> None:
    begin(tmp_path, [100.0] * 60)
    write_steps(tmp_path / "rank-00001", make_rows([110.0] * 50))
    (tmp_path / "rank-00002").mkdir()
    run = look(tmp_path, BEGAN_S + 10)
    assert [rank.run.steps for rank in run.ranks] == [60, 50, 0]
    assert [rank.run.rank for rank in run.by_mean] == [1, 0, 2]
    assert run.spread == pytest.approx(1.1)


def test_a_restarted_job_shows_its_attempts_one_after_the_other(tmp_path: Path) -> None:
    begin(tmp_path, [100.0] * 60)
    write_rank(tmp_path / RANK, process=gone())
    write_rank(tmp_path / f"{RANK}.2", process=alive())
    write_steps(tmp_path / f"{RANK}.2", make_rows([50.0] * 30, began_ns=BEGAN_NS + 60_000_000_000))
    run = look(tmp_path, BEGAN_S + 62)
    assert [(rank.run.attempt, rank.run.steps) for rank in run.ranks] == [(2, 30)]
    assert [(rank.run.attempt, rank.run.steps) for rank in run.earlier] == [(1, 60)]
    assert run.status == "training"


def test_two_processes_at_the_same_time_are_no_attempts(tmp_path: Path) -> None:
    begin(tmp_path, [100.0] * 60)
    write_rank(tmp_path / f"{RANK}.2", process=alive())
    write_steps(tmp_path / f"{RANK}.2", make_rows([100.0] * 60))
    run = look(tmp_path, BEGAN_S + 10)
    assert [(rank.run.rank, rank.run.attempt) for rank in run.ranks] == [(0, 1), (0, 2)]
    assert run.earlier == ()


def test_a_clock_that_is_ahead_is_noted(tmp_path: Path) -> None:
    end = begin(tmp_path, [100.0] * 60)
    run = look(tmp_path, end - 100)
    assert run.status == "training"
    assert run.notes == ("the job's clock is 100 s ahead of this machine's",)


def test_a_clock_that_was_set_back_changes_no_rate(tmp_path: Path) -> None:
    begin(tmp_path, [100.0] * 60)
    file = tmp_path / RANK / "steps.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows[30:]:
        row["end_unix_ns"] -= 3600 * 10**9
    write_steps(tmp_path / RANK, rows)
    run = look(tmp_path, BEGAN_S - 3590)
    (rank,) = run.ranks
    assert rank.steps_per_s == pytest.approx(10.0)
    assert rank.goodput is None or 0 <= rank.goodput <= 1
    assert run.seconds == 0.0


def test_memory_is_that_of_the_last_step(tmp_path: Path) -> None:
    begin(tmp_path, [100.0] * 50, allocated_bytes=[10**9 + 1000 * step for step in range(50)])
    (rank,) = look(tmp_path, BEGAN_S + 10).ranks
    assert rank.memory_bytes == 10**9 + 49_000


def test_a_capture_that_says_no_times_of_day(tmp_path: Path) -> None:
    write_run(tmp_path, process=alive())
    write_steps(tmp_path / RANK, [{"step": n, "wall_ns": 10 * MS} for n in range(50)])
    run = look(tmp_path, BEGAN_S + 10)
    assert run.status == "training"
    assert run.ranks[0].quiet_s is None


def test_a_second_look_explains_anew_what_has_grown(tmp_path: Path) -> None:
    """1% more steps count; fewer change the counts and rates alone."""
    begin(tmp_path, [100.0] * 1000)
    follower = RunFollower(tmp_path)
    first = explain_live(follower.read(), BEGAN_S + 200)
    rows = make_rows([300.0] * 30, number=1000, began_ns=BEGAN_NS + 104 * 10**9)
    append_steps(tmp_path / RANK, as_text(rows[:5]))
    second = explain_live(follower.read(), BEGAN_S + 200, first)
    assert second.ranks[0].run.times == first.ranks[0].run.times
    assert (second.ranks[0].run.steps, second.ranks[0].last_step) == (1005, 1004)
    assert second.ranks[0].recent_steps_per_s != first.ranks[0].recent_steps_per_s
    assert second.notes == ()
    append_steps(tmp_path / RANK, as_text(rows[5:]))
    third = explain_live(follower.read(), BEGAN_S + 200, second)
    assert third.ranks[0].run.times == look(tmp_path, BEGAN_S + 200).ranks[0].run.times


def test_a_look_at_many_ranks_explains_few_anew_and_the_end_explains_all(tmp_path: Path) -> None:
    write_run(tmp_path, process=alive())
    folders = [tmp_path / f"rank-{rank:05d}" for rank in range(12)]
    for folder in folders:
        write_steps(folder, make_rows([100.0] * 50))
    follower = RunFollower(tmp_path)
    first = explain_live(follower.read(), BEGAN_S + 10)
    for folder in folders:
        append_steps(folder, as_text(make_rows([200.0] * 50, number=50)))
    second = explain_live(follower.read(), BEGAN_S + 10, first)
    assert sum(rank.explained_steps == 100 for rank in second.ranks) == 4
    assert all(rank.run.steps == 100 for rank in second.ranks)
    write_run(tmp_path, code=0, ended_s=BEGAN_S + 20)
    last = explain_live(follower.read(), BEGAN_S + 20, second)
    assert all(rank.explained_steps == 100 for rank in last.ranks)
