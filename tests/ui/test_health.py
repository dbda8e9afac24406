"""`stepscope health`: three steps of all ranks, an answer, and the command is over."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from stepscope import explain_job
from stepscope.records.job import Clock, Job, RankTimes, Stragglers
from stepscope.records.rank_facts import NetworkPlace
from stepscope.ui.terminal.health import check_health
from verb_process import run_verb

Done = subprocess.CompletedProcess[str]
FOREVER = """
    import time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10**6):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).sum().backward()
        time.sleep(0.02)
        optimizer.step()
    dist.destroy_process_group()
"""


BRIEF = """
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
"""
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def health(script: Path, *options: str, launcher: tuple[str, ...] = ()) -> Done:
    return run_verb("health", *options, "--", sys.executable, *launcher, script)


def script(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(text))
    return file


def test_a_job_that_would_run_for_hours_is_looked_at_and_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    out = tmp_path / "run"
    train = script(tmp_path, FOREVER)
    done = health(train, "--json", "--out", str(out), launcher=TWO_RANKS)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 150
    told = json.loads(done.stdout)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    assert all(rank["own_ms"] > 20 for rank in told["ranks"])  # it sleeps 20 ms a step
    assert told["memory"][0]["categories"]["parameters"] == 4 * (64 * 64 + 64)
    assert (out / "rank-00001/trace.json.gz").exists()
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert left.stdout == ""


def test_a_command_that_ends_too_early_is_said_so(tmp_path: Path) -> None:
    done = health(script(tmp_path, BRIEF))
    assert done.returncode == 4
    assert "after 2 steps; a check needs 7" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(("reserved", "healthy"), [(95, False), (50, True)])
def test_memory_that_is_nearly_full_is_not_healthy(
    golden: Path, reserved: int, healthy: bool
) -> None:
    explanation = explain_job(golden / "h200-resnet18")
    peak = {"reserved_bytes": reserved, "allocated_bytes": 40, "categories": {"parameters": 10}}
    captured = {"rank": 0, "device": {"memory_bytes": 100}, "memory": {"peak": peak}}
    found = check_health(explanation, [captured])
    assert found.healthy is healthy
    assert dict(found.lines)["memory"].endswith(f"({reserved}%)")
    assert ("memory is nearly full" in found.verdict) is not healthy


def job_of(own_ms: list[float], hosts: list[str]) -> Job:
    """Ranks with these steps without communication."""
    own = np.array([own_ms], np.int64) * 1_000_000
    times = [
        RankTimes(step_ms=200, own_ms=ms, exposed_comm_ms=200 - ms, compute_ms=ms, input_ms=0)
        for ms in own_ms
    ]
    return Job(
        ranks=tuple(range(len(own_ms))), times=tuple(times), hosts=dict(enumerate(hosts)),
        steps=(1,), step_ns=own, own_ns=own, input_ns=own * 0, exposed_comm_ns=own * 0,
        clock=Clock(aligned=False), collectives=(), arrivals=(),
        stragglers=Stragglers(verdict="none"), path=None, lanes=None,
        places={"node1": NetworkPlace(rack="B2", switch="leaf7")},
    )  # fmt: skip


def test_hosts_are_named_with_their_ranks_and_how_late_they_are(golden: Path) -> None:
    """Medians 96 and 108 ms: node1 is 12 ms behind."""
    job = job_of([95, 96, 97, 107, 108, 120], ["node0"] * 3 + ["node1"] * 3)
    found = check_health(replace(explain_job(golden / "h200-resnet18"), job=job), [])
    assert found.hosts == (
        {"host": "node1", "ranks": [3, 4, 5], "own_ms": 108, "late_ms": 12, "rack": "B2",
         "switch": "leaf7"},
        {"host": "node0", "ranks": [0, 1, 2], "own_ms": 96, "late_ms": -12, "rack": None,
         "switch": None},
    )  # fmt: skip
    assert dict(found.lines)["hosts"] == (
        "node1: ranks 3-5 late by 12.0 ms; node0: ranks 0-2 96.0 ms"
    )


def test_hosts_that_are_even_are_late_by_nothing_and_many_are_cut(golden: Path) -> None:
    hosts = [f"node{rank // 2}" for rank in range(16)]
    job = job_of([100.0] * 15 + [101], hosts)
    found = check_health(replace(explain_job(golden / "h200-resnet18"), job=job), [])
    line = dict(found.lines)["hosts"]
    assert "late" not in line
    assert "4 more between" in line


def test_one_host_has_no_line(golden: Path) -> None:
    job = job_of([100, 120], ["node0", "node0"])
    found = check_health(replace(explain_job(golden / "h200-resnet18"), job=job), [])
    assert found.hosts == ()
    assert dict(found.lines)["hosts"] == ""
