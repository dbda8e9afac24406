"""DeepSpeed's launcher: over ssh to hosts that get few variables, and on one host."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from ssh_hosts import NAMES, ssh_hosts, why_not
from trainer_jobs import (
    DDP,
    TORCHRUN,
    captured,
    check_ranks,
    end,
    free_port,
    losses,
    needs,
    read_rank,
    start,
)

pytestmark = [pytest.mark.launchers, needs("deepspeed")]
DEEPSPEED = (sys.executable, "-m", "deepspeed.launcher.runner")
CPU = {"DS_ACCELERATOR": "cpu"}


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_hosts_that_ssh_reaches_are_captured(tmp_path: Path) -> None:
    out = tmp_path / "run"
    (tmp_path / "hostfile").write_text("".join(f"{name} slots=1\n" for name in NAMES))
    (tmp_path / ".deepspeed_env").write_text("MINE=kept\n")
    options = ("--hostfile", str(tmp_path / "hostfile"), "--no_ssh_check")
    meeting = ("--master_addr", "127.0.0.1", "--master_port", str(free_port()))
    bare = start((*TORCHRUN, "--standalone", "--nproc-per-node=2", DDP), tmp_path)
    with ssh_hosts(tmp_path / "ssh") as found_first:
        variables = CPU | {"PATH": f"{found_first}{os.pathsep}{os.environ['PATH']}"}
        command = captured(out, *DEEPSPEED, *options, *meeting, DDP)
        output, _ = end(start(command, tmp_path, variables))
    assert losses(output) == losses(end(bare, code=None)[0])
    check_ranks(out, 2)
    assert [read_rank(out / f"rank-0000{rank}")["host"] for rank in (0, 1)] == list(NAMES)
    assert not list(out.rglob("*deepspeed*"))  # the user's lines may hold keys


def test_one_host(tmp_path: Path) -> None:
    options = ("--num_gpus", "2", "--master_port", str(free_port()))
    command = captured(tmp_path / "run", *DEEPSPEED, *options, DDP)
    end(start(command, tmp_path, CPU))
    check_ranks(tmp_path / "run", 2)
