"""Runs a script under `stepscope run`; its own clock and the explanation, side by side."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.trace.decode import Oddities
from stepscope.trace.run_folder.step_files import read_step_columns

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.records.rank import StepColumns

SCRIPTS = Path(__file__).parent / "scripts"
_TRIES = 3
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def three_tries(test: Callable[..., None]) -> Callable[..., None]:
    """Other work on the machine may spoil a run; a wrong number is wrong in all three."""

    @wraps(test)
    def attempt(tmp_path: Path, **arguments: Any) -> None:
        for number in range(_TRIES):
            try:
                folder = tmp_path / f"try-{number}"
                folder.mkdir()
                return test(tmp_path=folder, **arguments)
            except AssertionError:
                if number == _TRIES - 1:
                    raise
        return None

    return attempt


@dataclass(frozen=True)
class PlantedRun:
    """A run folder, the scripts' own clocks by rank, and the command's wall time."""

    folder: Path
    truths: list[dict[str, Any]]  # what each process printed, by rank
    command_ms: float
    said: str

    @property
    def truth(self) -> dict[str, Any]:
        (only,) = self.truths
        return only

    @cached_property
    def explained(self) -> dict[str, Any]:
        done = explain(self.folder)
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

    @cached_property
    def columns(self) -> list[StepColumns]:
        """Of each rank, as stepscope reads them."""
        folders = sorted(self.folder.glob("rank-*"))
        columns = (read_step_columns(folder, Oddities("steps")) for folder in folders)
        return [steps for steps in columns if steps is not None]

    def steady(self, rank: int = 0) -> list[int]:
        """Places of the steps that stepscope's mean is of."""
        places: list[int] = self.columns[rank].plain.nonzero()[0].tolist()
        return [place for place in places if place >= self.ranks[rank]["warm_up"]]

    def own_mean_ms(self, name: str = "step_ms", rank: int = 0) -> float:
        """Of the same steps by the script's own clock, without the time in which capture worked
        for itself. It does so after a step, before the optimizer's step returns to the script."""
        steps, values = self.columns[rank], self.truths[rank][name]
        after = (steps.end_unix_ns - steps.wall_ns)[1:] - steps.end_unix_ns[:-1]
        ours = steps.window | steps.memory
        places = self.steady(rank)
        saved = (after[n] / 1e6 for n in places if n < len(after) and (ours[n] or ours[n + 1]))
        return (math.fsum(values[n] for n in places) - math.fsum(saved)) / len(places)

    def planted_ms(self, rank: int = 0) -> float:
        """Per steady step, by the script's own clock."""
        places = self.steady(rank)
        return math.fsum(self.truths[rank]["planted_ms"][n] for n in places) / len(places)

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


def explain(folder: Path) -> subprocess.CompletedProcess[str]:
    return _call("-m", "stepscope", "explain", "--json", folder)


def run_planted(
    out: Path, script: str, *arguments: str, launch: tuple[str, ...] = ()
) -> PlantedRun:
    ours = ("-m", "stepscope", "run", "--no-explain", "--out", out, "--")
    began = time.perf_counter()
    done = _call(*ours, sys.executable, *launch, SCRIPTS / f"{script}.py", *arguments)
    command_ms = 1e3 * (time.perf_counter() - began)
    assert done.returncode == 0, done.stderr
    truths = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    return PlantedRun(out, sorted(truths, key=lambda truth: truth["rank"]), command_ms, done.stderr)


def _call(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )
