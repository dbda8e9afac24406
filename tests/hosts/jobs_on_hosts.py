"""Start the training on the hosts of a laboratory, bare or captured, and read what it left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab import TIMEOUT_S, HostOutcome, HostProcess, Lab

SCRIPT = Path(__file__).with_name("train.py")
STEPSCOPE = (sys.executable, "-m", "stepscope")
WINDOW = ("--wait", "5", "--warmup", "1", "--active", "3")


def capture(out: Path, *options: str) -> list[str]:
    """`stepscope run` up to the command."""
    return [*STEPSCOPE, "run", "--out", str(out), "--no-explain", *WINDOW, *options, "--"]


def start(
    lab: Lab,
    around: Mapping[str, Sequence[str]] | Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, HostProcess]:
    return lab.torchrun([str(SCRIPT)], env=env, around=around, **options)


def finish(job: Mapping[str, HostProcess], timeout_s: float = TIMEOUT_S) -> dict[str, HostOutcome]:
    return {name: process.wait(timeout_s) for name, process in job.items()}


def run(
    lab: Lab,
    around: Mapping[str, Sequence[str]] | Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, HostOutcome]:
    return finish(start(lab, around, env, **options))


def codes(outcomes: Mapping[str, HostOutcome]) -> dict[str, int]:
    return {name: outcome.code for name, outcome in outcomes.items()}


def losses(outcomes: Mapping[str, HostOutcome], steps: int) -> list[str]:
    """Every rank's losses of the first steps, with all their bits."""
    lines = [line.split() for outcome in outcomes.values() for line in outcome.stdout.splitlines()]
    found = [words for words in lines if "loss" in words and int(words[3]) < steps]
    return sorted(" ".join(words) for words in found)


def explain(*paths: Path) -> dict[str, Any]:
    """`stepscope explain --json`. Fails the test when it fails."""
    done = explained(*paths)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def explained(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [*STEPSCOPE, "explain", "--json", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
