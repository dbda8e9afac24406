"""Commands of one job, started together as its hosts would, and what they left."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE = Path(__file__).parent
DDP = str(HERE.parent / "measure" / "scripts" / "ddp.py")
TRAINERS = HERE.parent / "measure" / "scripts" / "trainers"
STEPS = 18  # of each of these scripts
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
LIMIT_S = 300.0
_FROM_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "OMPI_", "PMI", "PET_")


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed in this Python")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def captured(out: Path, *command: str, options: Sequence[str] = ()) -> tuple[str, ...]:
    """The command behind `stepscope run`."""
    ours = (sys.executable, "-m", "stepscope", "run", "--no-explain", "--out", str(out))
    return (*ours, *options, "--", *command)


def start(
    command: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    users = {k: v for k, v in os.environ.items() if not k.startswith(_FROM_LAUNCHERS)}
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=users | quiet | dict(variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str], code: int | None = 0) -> tuple[str, str]:
    """Its output, once it has ended with this exit code; None: with any. A bare job of gloo ranks
    is aborted now and then when it destroys its group, after the last loss."""
    try:
        out, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        raise AssertionError(f"never ended:\n{out[-2000:]}{errors[-4000:]}") from None
    assert code is None or process.returncode == code, out[-2000:] + errors[-4000:]
    return out, errors


def losses(*outputs: str) -> list[str]:
    """Sorted, because ranks print as they come."""
    words = (line.split() for output in outputs for line in output.splitlines())
    return sorted(" ".join(line[-2:]) for line in words if line and line[-1].startswith("0x"))


def read_rank(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "rank.json").read_text())
    assert isinstance(content, dict)
    return content


def check_ranks(out: Path, ranks: int, steps: int = STEPS) -> None:
    """Every rank was captured whole, and the run is closed."""
    names = sorted(path.name for path in out.glob("rank-*"))
    assert names == [f"rank-{rank:05d}" for rank in range(ranks)]
    for name in names:
        rank = read_rank(out / name)
        assert (rank["world_size"], rank["steps"], rank["status"]) == (ranks, steps, "finished")
        assert rank["problems"] == []
        assert (out / name / "trace.json.gz").exists()
    run = json.loads((out / "run.json").read_text())
    assert (run["status"], run["exit_code"]) == ("finished", 0)


def explain(out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "stepscope", "explain", str(out), "--json", "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert isinstance(content, dict)
    return content


def notes(explanation: dict[str, Any]) -> dict[str, str]:
    return {note["id"]: note["detail"] for note in explanation["quality"]}
