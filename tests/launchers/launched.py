"""A training under a launcher, bare or with stepscope, and what it left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SCRIPT = str(Path(__file__).parent / "scripts" / "ddp.py")
TRAIN = ("python", SCRIPT)
ENDLESS = ("STEPS=100000", "MS=20")
BIN = Path(sys.executable).parent
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC_")
_LIMIT_S = 240.0


def environment(others: Mapping[str, str]) -> dict[str, str]:
    """As a user's shell: stepscope and torchrun on the path, an address where ranks meet."""
    users = {name: text for name, text in os.environ.items() if not name.startswith(_LAUNCHERS)}
    path = os.pathsep.join([str(BIN), others.get("PATH", users["PATH"])])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return users | meeting | quiet | dict(others) | {"PATH": path}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@dataclass(slots=True)
class Launched:
    """A command that runs; its output goes to files, as a scheduler writes it."""

    process: subprocess.Popen[bytes]
    folder: Path
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, folder: Path, command: tuple[str, ...], others: Mapping[str, str]) -> Launched:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as errors:
            process = subprocess.Popen(
                command, cwd=folder, env=environment(others), stdout=out, stderr=errors
            )
        return cls(process, folder)

    def wait(self) -> int:
        try:
            return self.process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"never ended:\n{self.stderr}") from None

    @property
    def stdout(self) -> list[str]:
        """Sorted: ranks print at the same time."""
        return sorted((self.folder / "stdout").read_text().splitlines())

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def reports(self) -> int:
        """How many times the run was explained."""
        return self.stderr.count("verdict  ")


def until(done: Callable[[], object], what: str) -> None:
    limit = time.monotonic() + _LIMIT_S
    while not done():
        assert time.monotonic() < limit, what
        time.sleep(0.2)


def trained(run: Launched, steps: int, ranks: int = 2) -> Callable[[], bool]:
    """Whether every rank has printed so many losses."""

    def reached() -> bool:
        lines = run.stdout
        return all(sum(line.startswith(f"{r} ") for line in lines) >= steps for r in range(ranks))

    return reached


def read_run(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "run.json").read_text())
    assert isinstance(content, dict)
    return content


def hosts_of_ranks(folder: Path) -> dict[str, str]:
    """By the names of the ranks' folders."""
    files = sorted(folder.glob("rank-*/rank.json"))
    return {file.parent.name: json.loads(file.read_bytes())["host"] for file in files}


def explain(folder: Path) -> dict[str, Any]:
    """The JSON of `stepscope explain`, which must succeed."""
    command = [str(BIN / "stepscope"), "explain", str(folder), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    content = json.loads(ended.stdout)
    assert isinstance(content, dict)
    return content


def notes(explanation: dict[str, Any]) -> dict[str, str]:
    return {note["id"]: note["detail"] for note in explanation["quality"]}
