"""torchrun: static, with a rendezvous, after a killed worker and a lost host; torchrun outside."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from trainer_jobs import (
    DDP,
    HERE,
    TORCHRUN,
    captured,
    check_ranks,
    end,
    explain,
    free_port,
    losses,
    notes,
    read_rank,
    start,
)

pytestmark = pytest.mark.launchers
DIES = str(HERE / "scripts" / "host_dies.py")
STANDALONE = ("--standalone", "--nproc-per-node=2")
# torch 2.13 gives all attempts on one host one store, where gloo finds dead addresses.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
QUICK = "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,is_host=0"


def test_two_static_hosts_train_and_are_captured_as_one(tmp_path: Path) -> None:
    out = tmp_path / "run"
    bare = start((*TORCHRUN, *STANDALONE, DDP), tmp_path)
    where = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    commands = [captured(out, *TORCHRUN, *where, f"--node-rank={place}", DDP) for place in range(2)]
    hosts = [start(command, tmp_path) for command in commands]
    outputs = [end(host)[0] for host in hosts]
    assert losses(*outputs) == losses(end(bare, code=None)[0])
    assert len(losses(*outputs)) == 36
    check_ranks(out, 2)


def test_a_killed_worker_is_restarted_and_attempts_stay_apart(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = (*TORCHRUN, *STANDALONE, "--max-restarts=1", DIES, str(tmp_path / "died"), "0")
    end(start(captured(out, *command), tmp_path, OWN_STORE))
    explanation = explain(out)
    steps = {(r["attempt"], r["rank"]): r["steps"] for r in explanation["run"]["ranks"]}
    assert 0 < steps.pop((1, 1)) <= 15  # it was killed, with what it had not written yet
    assert steps == {(1, 0): 15, (2, 0): 18, (2, 1): 18}
    assert [(r["rank"], r["world_size"]) for r in explanation["ranks"]] == [(0, 2), (1, 2)]
    assert notes(explanation)["restarted"] == (
        "the job was restarted: attempt 1 ended after 15 steps; attempt 2 is explained"
    )


def test_a_lost_host_leaves_a_smaller_job_and_both_are_told(tmp_path: Path) -> None:
    out, port = tmp_path / "run", free_port()
    # No agent holds the store, or the job would end with that one.
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    meeting = ("--rdzv-backend=c10d", "--rdzv-id=e1", f"--rdzv-endpoint=127.0.0.1:{port}")
    options = ("--nnodes=2:3", "--max-restarts=2", *meeting, QUICK)
    command = captured(out, *TORCHRUN, *options, DIES, str(tmp_path / "died"), "2")
    hosts = [start(command, tmp_path, OWN_STORE) for _ in range(3)]
    for host in hosts:
        end(host, code=None)
    del store
    assert sorted(host.returncode for host in hosts) == [-9, 0, 0]
    assert {path.name for path in out.glob("rank-*")} == {
        *("rank-00000", "rank-00001", "rank-00002"),
        *("rank-00000.2", "rank-00001.2"),
    }
    explanation = explain(out)
    assert [(r["rank"], r["world_size"]) for r in explanation["ranks"]] == [(0, 2), (1, 2)]
    assert notes(explanation)["restarted"] == (
        "the job was restarted: attempt 1 (3 ranks) ended after 15 steps; "
        "attempt 2 (2 ranks) is explained"
    )
    assert "was killed" in notes(explanation)["not-closed"]


def test_torchrun_starts_a_run_for_every_rank(tmp_path: Path) -> None:
    out = tmp_path / "run"
    inner = captured(out, sys.executable, DDP)
    end(start((*TORCHRUN, *STANDALONE, "--no-python", *inner), tmp_path))
    check_ranks(out, 2)
    assert len(list((out / "hosts").glob("0000?.json"))) == 2


def test_spawned_processes_are_ranks(tmp_path: Path) -> None:
    out = tmp_path / "run"
    script = str(HERE / "scripts" / "spawns.py")
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    end(start(captured(out, sys.executable, script), tmp_path, variables))
    check_ranks(out, 2)
    assert read_rank(out / "rank-00001")["host"] == read_rank(out / "rank-00000")["host"]
