"""A host that dies, cannot write or never comes: the others train as they would without us."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from jobs_on_hosts import capture, codes, explain, explained, losses, run, start
from lab import Lab

# The window is at steps 6 to 8.
MOMENTS = [
    pytest.param(3, id="before the window", marks=pytest.mark.slow),
    pytest.param(7, id="in the window"),
    pytest.param(12, id="after the window", marks=pytest.mark.slow),
]
LONGEST_CLOSE_S = 10.0


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_host_dies(lab: Lab, tmp_path: Path, moment: int) -> None:
    """The survivor's own time limit ends its rank; its exit code and what it captured are kept."""
    folder = tmp_path / "run"
    env = {"HOLD_AT": str(moment), "HOLD_FILE": str(tmp_path / "go"), "TIMEOUT_S": "8"}
    job = start(lab, capture(folder), env)
    for process in job.values():
        process.wait_for_line(f"holding at {moment}")
    time.sleep(1)  # what was written goes to the disk
    lab.kill("node1")
    (tmp_path / "go").touch()
    survivor = job["node0"].wait()
    assert survivor.code == 1
    assert "not waiting any longer for node1" in survivor.stderr
    assert "Traceback" not in survivor.stderr.split("stepscope: run folder")[-1]
    hosts = [json.loads((folder / f"hosts/0000{place}.json").read_text()) for place in (0, 1)]
    assert [host["status"] for host in hosts] == ["finished", "running"]
    assert [host.get("exit_code") for host in hosts] == [1, None]
    done = explained(folder)
    assert done.returncode in (0, 4)
    assert "Traceback" not in done.stderr
    if moment == 12:
        answer = json.loads(done.stdout)
        assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]
        (note,) = [note for note in answer["quality"] if note["id"] == "not-closed"]
        assert "node1" in note["detail"]


@pytest.mark.slow
def test_the_first_host_dies(lab: Lab, tmp_path: Path) -> None:
    """Nobody closes the run; the second host's part is whole, and the run can be explained."""
    folder = tmp_path / "run"
    env = {"HOLD_AT": "12", "HOLD_FILE": str(tmp_path / "go"), "TIMEOUT_S": "8"}
    job = start(lab, capture(folder), env)
    for process in job.values():
        process.wait_for_line("holding at 12")
    time.sleep(1)
    lab.kill("node0")
    (tmp_path / "go").touch()
    assert job["node1"].wait().code == 1
    answer = explain(folder)
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]
    assert "not-closed" in {note["id"] for note in answer["quality"]}


def test_a_folder_that_one_host_cannot_write(lab: Lab, tmp_path: Path) -> None:
    """That host's half runs without stepscope, and the other half is captured and explained."""
    folder = tmp_path / "disk" / "run"
    folder.parent.mkdir()
    lab.make_read_only("node1", folder.parent)
    bare = run(lab, env={"STEPS": "14"})
    captured = run(lab, capture(folder), {"STEPS": "14"})
    assert codes(captured) == codes(bare) == {"node0": 0, "node1": 0}
    assert losses(captured) == losses(bare)
    assert "the command runs without stepscope" in captured["node1"].stderr
    assert "read-only" in captured["node1"].stderr.lower()
    answer = explain(folder)
    assert [rank["rank"] for rank in answer["ranks"]] == [0]
    assert "missing-hosts" in {note["id"] for note in answer["quality"]}


@pytest.mark.slow
def test_a_host_that_never_shows_up_delays_only_the_explanation(lab: Lab, tmp_path: Path) -> None:
    options = ["--rdzv-conf", "timeout=8,join_timeout=8"]
    bare = start(lab, only=["node0"], options=options)["node0"].wait()
    alone = start(lab, capture(tmp_path / "run"), only=["node0"], options=options)["node0"].wait()
    assert alone.code == bare.code != 0
    assert "nothing was captured" in alone.stderr
    assert alone.seconds < 2 * bare.seconds + LONGEST_CLOSE_S


def test_a_worker_that_is_killed_is_started_again(lab: Lab, tmp_path: Path) -> None:
    """Elastic: both hosts start their workers again, and the attempts are kept apart."""
    folder = tmp_path / "run"
    env = {"STEPS": "14", "DIE_RANK": "1", "DIE_AT": "11", "DIE_MARK": str(tmp_path / "died")}
    again = {"rendezvous": "c10d", "options": ["--max-restarts=2"]}
    captured = run(lab, capture(folder), env, **again)
    assert codes(captured) == {"node0": 0, "node1": 0}
    assert (tmp_path / "died").exists()
    finished = [line for line in losses(captured) if "step 13 " in line]
    assert len(finished) == 2
    names = sorted(path.name for path in folder.glob("rank-*"))
    assert names == ["rank-00000", "rank-00000.2", "rank-00001", "rank-00001.2"]
    answer = explain(folder)
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]
