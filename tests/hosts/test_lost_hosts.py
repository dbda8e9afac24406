"""A host that dies, cannot write or never comes: the others train as they would without us."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from jobs_on_hosts import capture, codes, explain, explained, losses, run, start
from lab import HostOutcome, Lab, why_not

# The window is at steps 6 to 8.
MOMENTS = {"before": 3, "in": 7, "after": 12}
LONGEST_CLOSE_S = 10.0


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
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
    assert done.returncode == (4 if moment == 3 else 0), done.stderr
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


@pytest.mark.slow
def test_a_folder_that_one_host_cannot_write(
    lab: Lab, bare: Mapping[str, HostOutcome], tmp_path: Path
) -> None:
    """That host keeps its part in a temporary folder, and both parts are explained together."""
    folder, temporary = tmp_path / "disk" / "run", tmp_path / "temporary"
    folder.parent.mkdir()
    temporary.mkdir()
    lab.make_read_only("node1", folder.parent)
    captured = run(lab, capture(folder), {"STEPS": "14", "TMPDIR": str(temporary)})
    assert codes(captured) == codes(bare) == {"node0": 0, "node1": 0}
    assert losses(captured, 14) == losses(bare, 14)
    assert "read-only file system: this host's part" in captured["node1"].stderr
    answer = explain(folder)
    assert [rank["rank"] for rank in answer["ranks"]] == [0]
    assert "missing-hosts" in {note["id"] for note in answer["quality"]}
    (part,) = (temporary / "stepscope-runs").iterdir()
    together = explain(folder, part)
    assert [rank["rank"] for rank in together["ranks"]] == [0, 1]
    assert "missing-hosts" not in {note["id"] for note in together["quality"]}


@pytest.mark.slow
def test_a_host_that_never_shows_up_delays_only_the_explanation(lab: Lab, tmp_path: Path) -> None:
    options = ["--rdzv-conf", "timeout=8,join_timeout=8"]
    bare = start(lab, only=["node0"], options=options)["node0"].wait()
    alone = start(lab, capture(tmp_path / "run"), only=["node0"], options=options)["node0"].wait()
    assert alone.code == bare.code != 0
    assert "nothing was captured" in alone.stderr
    assert alone.seconds < 2 * bare.seconds + LONGEST_CLOSE_S


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again(lab: Lab, tmp_path: Path) -> None:
    """Elastic: both hosts start their workers again, and the attempts are kept apart."""
    folder = tmp_path / "run"
    env = {"STEPS": "14", "DIE_RANK": "1", "DIE_AT": "11", "DIE_MARK": str(tmp_path / "died")}
    again = {"rendezvous": "c10d", "options": ["--max-restarts=2"]}
    captured = run(lab, capture(folder), env, **again)
    assert codes(captured) == {"node0": 0, "node1": 0}
    assert (tmp_path / "died").exists()
    finished = [line for line in losses(captured, 14) if "step 13 " in line]
    assert len(finished) == 2
    names = sorted(path.name for path in folder.glob("rank-*"))
    assert names == ["rank-00000", "rank-00000.2", "rank-00001", "rank-00001.2"]
    answer = explain(folder)
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]


@pytest.mark.slow
def test_ranks_get_other_numbers_after_a_host_is_lost(tmp_path: Path) -> None:
    """Elastic, two to three hosts: node1 dies, and node2's rank 2 goes on as rank 1."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    folder = tmp_path / "run"
    env = {"STEPS": "14", "HOLD_AT": "12", "HOLD_FILE": str(tmp_path / "go"), "TIMEOUT_S": "8"}
    quick = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = ["--nnodes=2:3", "--max-restarts=3", "--rdzv-conf", quick]
    with Lab(hosts=3) as lab:
        job = start(lab, capture(folder), env, rendezvous="c10d", options=options)
        for process in job.values():
            process.wait_for_line("holding at 12")
        time.sleep(1)
        lab.kill("node1")
        (tmp_path / "go").touch()
        outcomes = {name: job[name].wait() for name in ("node0", "node2")}
    assert codes(outcomes) == {"node0": 0, "node2": 0}
    facts = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*/rank.json"))]
    hosts = {(one["rank"], one["world_size"]): one["host"] for one in facts}
    assert hosts == {
        (0, 3): "node0",
        (1, 3): "node1",
        (2, 3): "node2",
        (0, 2): "node0",
        (1, 2): "node2",
    }
    answer = explain(folder)
    assert [(rank["rank"], rank["world_size"]) for rank in answer["ranks"]] == [(0, 2), (1, 2)]
