"""Run folders written by hand, for a folder that is served."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from live_runs import BEGAN_S, make_rows, write_rank, write_run, write_steps
from shared_traces import GOLDEN

TOKEN = "a-token-for-the-tests"


def add_run(
    root: Path,
    name: str | bytes,
    *,
    step_ms: float = 10.0,
    started_unix: float = BEGAN_S,
    trace: bool = False,
    code: int = 0,
    **more: Any,
) -> Path:
    """A finished run of 30 steps."""
    folder = root / os.fsdecode(name)
    write_run(folder, code=code, started_unix=started_unix)
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(facts | more))
    rank = folder / "rank-00000"
    write_rank(rank, status="finished", device="NVIDIA H200")
    write_steps(rank, make_rows([step_ms + 0.1 * (step % 3) for step in range(30)]))
    if trace:
        shutil.copy(GOLDEN / "cpu_step.json.gz", rank / "trace.json.gz")
    return folder


def add_tune(root: Path, name: str) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    trial = {"remedies": ["fused-optimizer"], "measured_ms": 8.0, "parity": "rounding"}
    tune = {"schema": 1, "command": ["python", "train.py"], "baseline_ms": 10.0, "trials": [trial]}
    (folder / "tune.json").write_text(json.dumps(tune))
    return folder
