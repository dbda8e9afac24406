"""Following a run folder: which one, which processes, and small files read when they change."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from live_runs import alive, gone, make_rows, write_rank, write_run, write_steps
from stepscope.errors import UnreadableInputError, UsageError
from stepscope.trace.run_folder.follow_run import RunFollower, choose_run


def test_without_a_name_the_newest_run_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("20260102-090000-train", "20260101-120000-train", "20251231-235959-train"):
        write_run(tmp_path / "stepscope-runs" / name)
    assert choose_run(None) == Path("stepscope-runs/20260102-090000-train")
    for name, day in (("Slurm-9.0-train", 1), ("Slurm-10.0-train", 3)):
        write_run(tmp_path / "stepscope-runs" / name)
        written = time.mktime((2026, 1, day, 12, 0, 0, 0, 0, -1))
        os.utime(tmp_path / "stepscope-runs" / name / "run.json", (written, written))
        newest = "Slurm-10.0-train" if day == 3 else "20260102-090000-train"
        assert choose_run(None) == Path("stepscope-runs") / newest


def test_without_any_run_the_user_is_asked_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="this folder has no run under stepscope-runs"):
        choose_run(None)


def test_a_folder_that_is_still_empty_is_a_run_that_starts(tmp_path: Path) -> None:
    followed = RunFollower(choose_run(str(tmp_path))).read()
    assert followed.run is None
    assert followed.ranks == ()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", "nowhere does not exist"),
        ("file", "file is a file"),
        (".", "is not a run folder"),
    ],
)
def test_what_is_no_run_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(UnreadableInputError, match=words):
        choose_run(name)


def test_a_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a URL"):
        choose_run("s3://bucket/run")


def test_a_folder_that_goes_away_is_said(tmp_path: Path) -> None:
    follower = RunFollower(tmp_path / "run")
    with pytest.raises(UnreadableInputError, match="does not exist"):
        follower.read()


def test_each_process_has_its_rank_attempt_and_state(tmp_path: Path) -> None:
    write_run(tmp_path, process=alive())
    write_rank(tmp_path / "rank-00001", rank=1, process=gone())
    write_rank(tmp_path / "rank-00001.2", rank=1, process=alive())
    write_rank(tmp_path / "rank-00000", status="finished")
    (tmp_path / "rank-00002").mkdir()
    followed = RunFollower(tmp_path).read()
    assert followed.state == "running"
    ranks = [(rank.rank, rank.attempt, rank.state) for rank in followed.ranks]
    assert ranks == [(0, 1, "ended"), (1, 1, "gone"), (1, 2, "running"), (2, 1, "unknown")]


def test_ranks_that_come_later_and_files_that_change_are_seen(tmp_path: Path) -> None:
    write_run(tmp_path)
    follower = RunFollower(tmp_path)
    assert follower.read().ranks == ()
    write_rank(tmp_path / "rank-00000")
    write_steps(tmp_path / "rank-00000", make_rows([10.0]))
    (rank,) = follower.read().ranks
    assert (rank.state, rank.steps.seen) == ("unknown", 1)
    assert rank.times is not None
    write_rank(tmp_path / "rank-00000", status="finished")
    (rank,) = follower.read().ranks
    assert rank.state == "ended"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"status": 7}', "null"])
def test_files_that_make_no_sense_count_as_not_written(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    (tmp_path / "rank-00000").mkdir()
    (tmp_path / "rank-00000/rank.json").write_text(text)
    followed = RunFollower(tmp_path).read()
    assert followed.state is None
    assert [rank.state for rank in followed.ranks] == ["unknown"]
