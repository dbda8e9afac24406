"""Run folders written by hand, as a job leaves them while it trains."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.records.folders import part_name, this_process

MS = 1_000_000
BEGAN_S = 1_700_000_000.0
BEGAN_NS = round(BEGAN_S * 1e9)


def make_rows(
    wall_ms: list[float], *, number: int = 0, began_ns: int = BEGAN_NS, **columns: list[Any]
) -> list[dict[str, Any]]:
    """Steps one after the other; `columns` are other fields of the lines, one value for each."""
    walls = [round(ms * MS) for ms in wall_ms]
    ends = began_ns + np.cumsum(walls)
    return [
        {
            "step": number + place,
            "wall_ns": wall,
            "forward_ns": wall - sum(columns[name][place] for name in columns if name in PHASES),
            "end_unix_ns": int(ends[place]),
            "window": False,
            **{name: values[place] for name, values in columns.items()},
        }
        for place, wall in enumerate(walls)
    ]


PHASES = ("data_ns", "backward_ns", "optimizer_ns", "other_ns", "evaluation_ns", "checkpoint_ns")


def as_text(rows: list[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def write_steps(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "steps.jsonl").write_text(as_text(rows))


def append_steps(folder: Path, text: str) -> None:
    with (folder / "steps.jsonl").open("a") as file:
        file.write(text)


def replace_steps(folder: Path, rows: list[dict[str, Any]]) -> None:
    """As packing does: another file gets the name."""
    new = folder / "new"
    new.write_text(as_text(rows))
    new.replace(folder / "steps.jsonl")


def write_part(folder: Path, number: int, rows: list[dict[str, Any]]) -> None:
    numbers = [row["step"] for row in rows]
    part = {
        "schema": 1,
        "steps": len(rows),
        "base": {},
        "columns": {
            "step": np.diff(numbers, prepend=0).tolist(),
            "wall_ns": [row["wall_ns"] for row in rows],
        },
        "marks": {},
    }
    (folder / part_name(number)).write_bytes(gzip.compress(json.dumps(part).encode()))


def write_run(folder: Path, *, code: int | None = None, ended_s: float = 0.0, **more: Any) -> None:
    """run.json of a command that runs, or that ended with this exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    run = {"command": ["python", "train.py"], "started_unix": BEGAN_S, "status": "running"}
    if code is not None:
        run |= {"status": "finished", "exit_code": code, "ended_unix": ended_s}
    (folder / "run.json").write_text(json.dumps(run | more))


def write_rank(folder: Path, *, rank: int = 0, **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"schema": 1, "rank": rank, "world_size": 1, "status": "running", "problems": []}
    (folder / "rank.json").write_text(json.dumps(facts | more))


def alive() -> dict[str, Any]:
    """The identity of a process that runs: this one."""
    return asdict(this_process())


def gone() -> dict[str, Any]:
    return alive() | {"started_ticks": 1}
