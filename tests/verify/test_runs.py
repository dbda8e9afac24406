"""What a path stands for."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from folders import write_run

from stepscope.errors import NotCapturedError, UnreadableInputError
from stepscope.verify.pairs import AB, PairedRuns, plan_pairs, read_pairs
from stepscope.verify.runs import find_runs


def test_only_plain_steps_of_a_run_folder_count(tmp_path: Path) -> None:
    (run,) = find_runs(str(write_run(tmp_path / "run", [10, 11, 12])))
    assert run.steps_are == "measured"
    assert run.step_ms.tolist() == [10, 11, 12]
    assert run.rank is None
    assert not run.has_trace


def test_device_time_is_the_step_where_it_is_known(tmp_path: Path) -> None:
    (run,) = find_runs(str(write_run(tmp_path / "run", [10, 11, 12], device_ms=[20, 21])))
    assert run.step_ms.tolist() == [20, 21]


def test_a_jobs_step_is_its_slowest_ranks(tmp_path: Path) -> None:
    """By the mean: one long step makes a rank slow."""
    folder = write_run(tmp_path / "run", [10, 10, 15], [12, 12, 12], [11, 11, 11])
    (run,) = find_runs(str(folder))
    assert run.rank == 1
    assert run.step_ms.tolist() == [12, 12, 12]
    (run,) = find_runs(str(write_run(tmp_path / "stalls", [10, 10, 30], [12, 12, 12])))
    assert run.rank == 0


def test_one_ranks_folder_or_its_steps_stand_for_that_rank(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [10, 11], [20, 21])
    for path in (folder / "rank-00001", folder / "rank-00001/steps.jsonl"):
        (run,) = find_runs(str(path))
        assert run.step_ms.tolist() == [20, 21]
        assert run.notes == (f"{folder / 'rank-00001'} has the steps of 1 of 2 ranks",)


def test_a_rank_that_left_nothing_is_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [10, 11], [10, 11])
    (folder / "rank-00001/steps.jsonl").unlink()
    (run,) = find_runs(str(folder))
    assert run.notes == (f"{folder} has the steps of 1 of 2 ranks",)


def test_a_command_that_failed_is_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [10, 11])
    (folder / "run.json").write_text('{"exit_code": 9}')
    (run,) = find_runs(str(folder))
    assert run.notes == (f"{folder}: its command ended with exit code 9",)


def test_a_second_process_of_the_same_rank_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [10, 11])
    write_run(tmp_path / "other", [90, 91])
    (tmp_path / "other/rank-00000").rename(folder / "rank-00000.2")
    (run,) = find_runs(str(folder))
    assert run.step_ms.tolist() == [10, 11]


def test_a_folder_of_runs_is_all_of_them(tmp_path: Path) -> None:
    write_run(tmp_path / "all/2", [20, 21])
    write_run(tmp_path / "all/1", [10, 11])
    (tmp_path / "all/notes").mkdir()
    runs = find_runs(str(tmp_path / "all"))
    assert [run.step_ms[0] for run in runs] == [10, 20]


def test_memory_and_facts_come_along(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [10, 11], [10, 11], peak_bytes=123, host="h1")
    (run,) = find_runs(str(folder))
    assert run.peak_bytes == 123
    assert run.facts["host"] == "h1"
    assert run.facts["world_size"] == 2
    assert run.facts["command"] == ["python", "train.py"]


def test_a_list_is_a_run_of_its_own_kind(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\n2\n")
    (run,) = find_runs(str(tmp_path / "a.txt"), unit="s")
    assert (run.steps_are, run.step_ms.tolist()) == ("listed", [1000, 2000])


def test_a_trace_or_a_folder_of_traces_is_profiled(tmp_path: Path, golden: Path) -> None:
    for path in (golden / "cuda_step.json.gz", golden):
        (run,) = find_runs(str(path))
        assert (run.steps_are, run.has_trace) == ("profiled", True)
    assert len(run.step_ms) == 0  # not read yet


def test_the_recorded_run_folder_has_93_plain_steps(golden: Path) -> None:
    (run,) = find_runs(str(golden / "h200-resnet18"))
    assert len(run.step_ms) == 93
    assert np.median(run.step_ms) == pytest.approx(24.86, rel=0.02)  # the script's own timing
    assert run.has_trace
    assert run.peak_bytes == 3_074_728_616
    assert run.facts["device"]["name"] == "NVIDIA H200"


def test_a_run_without_steps_is_not_captured(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    with pytest.raises(NotCapturedError, match="has no step to compare"):
        find_runs(str(folder))


def test_nothing_there_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInputError, match="does not exist"):
        find_runs(str(tmp_path / "nothing"))


# Whose turn it is, and which runs belong together.


def test_every_two_pairs_are_a_b_b_a_or_the_other_way_round() -> None:
    firsts = "".join(pair.first for pair in plan_pairs(200, seed=3))
    twos = {firsts[place : place + 2] for place in range(0, 200, 2)}
    assert twos == {"ab", "ba"}


def test_the_order_is_the_seeds() -> None:
    assert plan_pairs(20, seed=1) == plan_pairs(20, seed=1)
    assert plan_pairs(20, seed=1) != plan_pairs(20, seed=2)


def test_folders_sort_as_they_ran() -> None:
    names = [pair.a for pair in plan_pairs(120)]
    assert names == sorted(names)
    assert names[0] == "a-001"


def write(folder: Path, done: tuple[bool, ...]) -> None:
    pairs = tuple(
        msgspec.structs.replace(pair, done=is_done)
        for pair, is_done in zip(plan_pairs(len(done)), done, strict=True)
    )
    turns = PairedRuns(command_a=("a",), command_b=("b",), pairs=pairs)
    (folder / AB).write_bytes(msgspec.json.encode(turns))


def test_only_finished_pairs_are_compared(tmp_path: Path) -> None:
    write(tmp_path, (True, False, True))
    a, b = read_pairs(tmp_path)
    assert [Path(path).name for path in a] == ["a-01", "a-03"]
    assert [Path(path).name for path in b] == ["b-01", "b-03"]


def test_not_one_finished_pair_is_not_captured(tmp_path: Path) -> None:
    write(tmp_path, (False,))
    with pytest.raises(NotCapturedError, match="no pair of runs has finished"):
        read_pairs(tmp_path)


def test_something_else_of_that_name_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / AB).write_text("{}")
    with pytest.raises(UnreadableInputError, match="was not written by stepscope ab"):
        read_pairs(tmp_path)
    with pytest.raises(UnreadableInputError):
        read_pairs(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["[" * 100_000, "", '{"pairs": 3}', "\ud800"])
def test_a_damaged_plan_is_an_error_of_ours(tmp_path: Path, content: str) -> None:
    (tmp_path / "ab.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(UnreadableInputError, match="not written by stepscope ab"):
        read_pairs(tmp_path)


def test_a_plan_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ab.json")
    with pytest.raises(UnreadableInputError, match="not a regular file"):
        read_pairs(tmp_path)
