"""Runs a script under `stepscope run`; its own clock and the explanation, side by side."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stepscope.trace.decode import Oddities
from stepscope.trace.step_files import read_step_columns

SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@dataclass(frozen=True)
class OwnClock:
    """What one process of a script printed."""

    printed: dict[str, Any]

    def mean_step_ms(self, places: list[int]) -> float:
        return _mean(self.printed["step_ms"], places)

    def planted_ms(self, places: list[int]) -> float:
        """Per step, of these steps."""
        return _mean(self.printed["planted_ms"], places)


@dataclass(frozen=True)
class PlantedRun:
    """A run folder, the scripts' own clocks by rank, and the command's wall time."""

    folder: Path
    clocks: list[OwnClock]
    command_ms: float
    said: str

    @property
    def clock(self) -> OwnClock:
        (only,) = self.clocks
        return only

    @cached_property
    def explained(self) -> dict[str, Any]:
        done = _call("-m", "stepscope", "explain", "--json", self.folder)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    @property
    def ranks(self) -> list[dict[str, Any]]:
        ranks: list[dict[str, Any]] = self.explained["run"]["ranks"]
        return ranks

    @property
    def run(self) -> dict[str, Any]:
        (only,) = self.ranks
        return only

    def steady(self, rank: int = 0) -> list[int]:
        """Places of the steps that stepscope's mean is of."""
        steps = read_step_columns(self.folder / f"rank-{rank:05d}", Oddities("steps"))
        assert steps is not None
        return [n for n in steps.plain.nonzero()[0].tolist() if n >= self.ranks[rank]["warm_up"]]

    def stall(self, cause: str, rank: int = 0) -> dict[str, Any]:
        stalls = {stall["cause"]: stall for stall in self.ranks[rank]["stalls"]}
        assert cause in stalls, f"no stalls for {cause}: {stalls}"
        stall: dict[str, Any] = stalls[cause]
        return stall

    @property
    def findings(self) -> dict[str, dict[str, Any]]:
        return {finding["id"]: finding for finding in self.explained["findings"]}

    def budget_ms(self, *names: str) -> float:
        parts = self.explained["budget"]["parts"]
        return math.fsum(part["ms"] for part in parts if part["id"] in names)

    def account_ms(self, *names: str) -> float:
        parts = self.run["account"]["parts"]
        return math.fsum(part["ms"] for part in parts if part["id"] in names)


def run_planted(
    out: Path, script: str, *arguments: str, launch: tuple[str, ...] = ()
) -> PlantedRun:
    ours = ("-m", "stepscope", "run", "--no-explain", "--out", out, "--")
    began = time.perf_counter()
    done = _call(*ours, sys.executable, *launch, SCRIPTS / f"{script}.py", *arguments)
    command_ms = 1e3 * (time.perf_counter() - began)
    assert done.returncode == 0, done.stderr
    lines = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    clocks = [OwnClock(line) for line in sorted(lines, key=lambda line: line["rank"])]
    return PlantedRun(out, clocks, command_ms, done.stderr)


def _call(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )


def _mean(values: list[float], places: list[int]) -> float:
    return math.fsum(values[place] for place in places) / len(places)
