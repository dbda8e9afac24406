"""Several `stepscope run`s of one job share its run folder, and never another job's."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import UsageError
from stepscope.measure.settings import Settings
from stepscope.trace.run_folder.run_state import absent_hosts, run_notes
from stepscope.ui.jobs import capture
from stepscope.ui.jobs.capture import JobPart, PartTakenError, candidate_folders
from stepscope.ui.jobs.job_key import JobKey

COMMAND = ("torchrun", "train.py")
KEY = JobKey(name="torchrun", meeting="a:7", place=0, places=2)
ENDS_WITH_7 = "import sys; print('it ran'); sys.exit(7)"


def key(place: int | None, **others: Any) -> JobKey:
    facts = {"name": "torchrun", "meeting": "a:7", "place": place, "places": 2}
    return JobKey(**(facts | others))


def begin(folder: Path, of: JobKey) -> JobPart:
    return JobPart.begin(folder, COMMAND, Settings(folder=str(folder)), of)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(capture, "LONGEST_WAIT_S", 0.2)
    monkeypatch.setattr(capture, "_POLL_S", 0.01)
    return tmp_path / "run"


def test_two_parts_of_a_job_share_a_folder_and_the_first_host_closes_it(folder: Path) -> None:
    second, first = begin(folder, key(1)), begin(folder, key(0))
    assert (second.opened, second.closes) == (True, False)
    assert (first.opened, first.closes) == (False, True)
    for part in (second, first):
        part.close(7)
    assert second.close_job() == []
    assert json.loads((folder / "run.json").read_text())["status"] == "running"
    first.close_job()
    run = json.loads((folder / "run.json").read_text())
    assert (run["status"], run["exit_code"]) == ("finished", 7)
    assert [(host["place"], host["exit_code"]) for host in run["hosts"]] == [(0, 7), (1, 7)]
    assert sorted(path.name for path in (folder / "hosts").iterdir()) == [
        "00000.json",
        "00001.json",
    ]
    assert run_notes(folder) == []
    assert absent_hosts([folder]) is None


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (key(1, meeting="b:7"), "holds a run of torchrun, not of torchrun"),
        (key(1, name="Slurm 4.0", meeting=None), "holds a run of torchrun, not of Slurm 4.0"),
        (key(0), "already holds part 0 of torchrun"),
    ],
)
def test_a_folder_of_another_job_is_left_alone(folder: Path, other: JobKey, says: str) -> None:
    begin(folder, key(0))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=says):
        begin(folder, other)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_with_files_of_the_user_is_left_alone(folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        begin(folder, key(0))
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_run_that_was_alone_is_no_ones_part(folder: Path) -> None:
    folder.mkdir()
    (folder / "run.json").write_text('{"schema": 1, "status": "finished"}')
    with pytest.raises(UsageError, match="holds a finished run"):
        begin(folder, key(1))


def test_a_part_that_comes_long_after_the_end_is_another_job(folder: Path) -> None:
    first = begin(folder, key(0))
    first.close(0)
    first.close_job()
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"ended_unix": time.time() - 3600}))
    with pytest.raises(UsageError, match="holds an earlier run of torchrun"):
        begin(folder, key(1))
    again = begin(folder, key(1, attempt=1))  # unless the launcher says it is started again
    assert again.record["attempt"] == 1


def test_a_requeued_job_is_another_attempt_in_the_same_folder(folder: Path) -> None:
    alone = JobKey(name="Slurm 47", place=0, places=1)
    first = begin(folder, alone)
    first.close(143)
    first.close_job()
    began = json.loads((folder / "run.json").read_text())["started_unix"]
    second = begin(folder, JobKey(name="Slurm 47", place=0, places=1, attempt=1))
    run = json.loads((folder / "run.json").read_text())
    assert (run["status"], run.get("exit_code"), run["started_unix"]) == ("running", None, began)
    second.close(0)
    second.close_job()
    run = json.loads((folder / "run.json").read_text())
    assert (run["exit_code"], run["started_unix"]) == (0, began)
    assert [host["attempt"] for host in run["hosts"]] == [0, 1]


def test_a_requeued_job_may_meet_elsewhere(folder: Path) -> None:
    slurm = {"name": "MPI 9001", "meeting": None, "allocation": "Slurm 47"}
    first = begin(folder, key(0, **slurm))
    first.close(143)
    first.close_job()
    again = slurm | {"name": "MPI 9002", "attempt": 1}
    assert begin(folder, key(0, **again)).record["attempt"] == 1
    with pytest.raises(UsageError, match="holds a run of MPI 9001, not of MPI 9002"):
        begin(folder, key(1, **(again | {"attempt": 0})))
    with pytest.raises(UsageError, match="holds a run of MPI 9001, not of MPI 9002"):
        begin(folder, key(1, **(again | {"allocation": "Slurm 48"})))


def test_a_host_that_never_comes_is_waited_for_shortly_and_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = begin(folder, key(0))
    part.close(0)
    part.close_job()
    assert "no longer waiting for 1 part that never arrived" in capsys.readouterr().err
    note = absent_hosts([folder])
    assert note is not None
    assert (note.id, note.count) == ("missing-hosts", 1)
    assert note.detail.startswith("1 of 2 parts of the job (1) are not in this folder")


def test_a_host_that_was_killed_is_not_waited_for(folder: Path) -> None:
    other = begin(folder, key(1))
    part = begin(folder, key(0))
    dead = json.loads(other._file.path.read_text())
    dead["process"] |= {"pid": 2**22 + 1}
    other._file.path.write_text(json.dumps(dead))
    part.close(0)
    assert part._open_parts() == ""
    part.close_job()
    (note,) = run_notes(folder)
    assert note.id == "not-closed"
    assert "was killed" in note.detail


def test_without_a_shared_disk_every_host_closes_its_own_part(tmp_path: Path, folder: Path) -> None:
    here, there = begin(folder, key(0)), begin(tmp_path / "there", key(1))
    for part in (there, here):
        part.close(0)
        part.close_job()
        run = json.loads((part.folder / "run.json").read_text())
        assert run["status"] == "finished"
    assert "with the folders of all hosts" in (there.farewell() or "")
    assert absent_hosts([folder]) is not None
    assert absent_hosts([folder, tmp_path / "there"]) is None


def test_parts_without_places_may_share_a_host(folder: Path) -> None:
    one, two = begin(folder, key(None)), begin(folder, key(None))
    assert one.closes
    assert not two.closes
    one.close(0)
    with pytest.raises(UsageError, match="already holds this host's part"):
        begin(folder, key(None))


def test_without_out_the_folders_name_is_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def choose_folder(of: JobKey) -> Path:
        return next(candidate_folders(None, COMMAND, of))

    folder = choose_folder(key(0))
    assert str(folder) == "stepscope-runs/torchrun-7-train"
    begin(folder, key(0))
    assert choose_folder(key(1)) == folder
    taken = folder.with_name(f"{folder.name}-2")
    assert choose_folder(key(1, meeting="localhost:7")) == folder
    (folder / "run.json").write_text('{"schema": 1}')
    assert choose_folder(key(1)) == taken


def test_the_same_training_twice_in_a_batch_script_gets_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = JobKey(name="Slurm 47", place=0, places=1)
    first, second, *_ = itertools.islice(candidate_folders(None, COMMAND, batch), 3)
    assert [first.name, second.name] == ["Slurm-47-train", "Slurm-47-train-2"]
    begin(first, batch)
    assert next(candidate_folders(None, COMMAND, batch)) == first  # another part's, for all we know
    with pytest.raises(PartTakenError, match="already holds part 0 of Slurm 47"):
        begin(first, batch)
    begin(second, batch)
    requeued = JobKey(name="Slurm 47", place=0, places=1, attempt=1)
    for folder in (first, second):
        assert begin(folder, requeued).record["attempt"] == 1


def test_parts_that_print_to_one_terminal_say_nothing_when_all_is_well(folder: Path) -> None:
    begin(folder, key(0))
    assert "the first host explains it" in (begin(folder, key(1)).farewell() or "")
    (folder / "hosts" / "00001.json").unlink()
    task = begin(folder, key(1, one_terminal=True))
    assert task.farewell() is None
    assert "one_terminal" not in task.record
    (folder / "hosts" / "00000.json").unlink()
    assert "To explain the job" in (task.farewell() or "")


def test_a_command_that_cannot_start_leaves_the_other_parts(folder: Path) -> None:
    first, second = begin(folder, key(0)), begin(folder, key(1))
    second.discard()
    assert (folder / "hosts" / "00000.json").exists()
    assert (folder / "run.json").exists()
    first.discard()
    assert not folder.exists()


def _part(out: Path, place: int, name: str = "bert") -> subprocess.Popen[str]:
    environment = os.environ | {"MASTER_ADDR": "a", "RANK": str(place), "WORLD_SIZE": "2"}
    run = [sys.executable, "-m", "stepscope", "run", "--out", str(out), "--job", name, "--"]
    return subprocess.Popen(
        [*run, sys.executable, "-c", ENDS_WITH_7],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_both_halves_of_a_job_run_and_a_second_job_of_that_name_does_not(tmp_path: Path) -> None:
    out = tmp_path / "run"
    parts = [_part(out, place) for place in (0, 1)]
    for part in parts:
        stdout, stderr = part.communicate(timeout=120)
        assert (stdout, part.returncode) == ("it ran\n", 7), stderr
    again = _part(out, 1)
    stdout, stderr = again.communicate(timeout=120)
    assert (stdout, again.returncode) == ("", 2)
    assert "already holds part 1 of bert: a run folder is never overwritten" in stderr
    other = _part(out, 1, name="gpt")
    stdout, stderr = other.communicate(timeout=120)
    assert (stdout, other.returncode) == ("", 2)
    assert "holds a run of bert, not of gpt" in stderr
