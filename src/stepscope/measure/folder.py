"""The run folder: names, and files that are either whole or not there."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

RUN = "run.json"
RANK = "rank.json"
PROCESSES = "processes.jsonl"
TRACE = "trace.json.gz"
STEPS = "steps.jsonl"
MEMORY = "memory.json"
COMMS = "comms.jsonl"
CLOCK = "clock.json"
SAMPLES = "samples.json"
PARTS = (TRACE, STEPS, MEMORY, COMMS, CLOCK, SAMPLES)
SCHEMA = 1
_HOME = "stepscope-runs"


def new_run_folder(script: str, *, home: Path | None = None) -> Path:
    """`stepscope-runs/<time>-<script>`; a number is added rather than anything overwritten."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(script).stem or "run")[:40]
    base = (home or Path(_HOME)) / f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}"
    for number in range(1, 1000):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(str(base))


def claim_rank_folder(run: Path, rank: int) -> Path:
    """This process's own folder; a second process of the same rank gets a numbered one."""
    for number in range(1, 1000):
        suffix = "" if number == 1 else f".{number}"
        folder = run / f"rank-{rank:05d}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(str(run))


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
