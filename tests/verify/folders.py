"""Run folders as capture leaves them, with steps of our choosing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PHASES = ("data", "forward", "backward", "optimizer", "other")


def write_run(
    folder: Path,
    *ranks: Sequence[float],
    device_ms: Sequence[float] | None = None,
    data_ms: Sequence[float] | None = None,
    peak_bytes: int | None = None,
    command: Sequence[str] = ("python", "train.py"),
    **facts: Any,
) -> Path:
    """One list of step times in ms a rank; forward is a half, backward the other half."""
    for rank, steps in enumerate(ranks):
        place = folder / f"rank-{rank:05d}"
        place.mkdir(parents=True)
        rows = [_row(0, 5000.0, first=True)]
        rows += [_row(number, ms) for number, ms in enumerate(steps, 1)]
        for number, ms in enumerate(data_ms or ()):
            _wait_for_data(rows[number + 1], ms)
        for number, ms in enumerate(device_ms or ()):
            rows[number + 1]["device_ns"] = round(ms * 1e6)
        rows.append(_row(len(rows), 900.0, window=True))
        rows.append(_row(len(rows), 800.0, memory=True))
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (place / "steps.jsonl").write_text(text + '{"step": 99, "wall_')  # killed while writing
        known = {"rank": rank, "world_size": len(ranks), "argv": ["src/train.py"], "torch": "2.13"}
        (place / "rank.json").write_text(json.dumps(known | facts))
        if peak_bytes is not None:
            peak = {"peak": {"allocated_bytes": peak_bytes}}
            (place / "memory.json").write_text(json.dumps(peak))
    whole = {"schema": 1, "command": list(command), "world_size": len(ranks)}
    (folder / "run.json").write_text(json.dumps(whole))
    return folder


def _row(step: int, ms: float, **marks: bool) -> dict[str, Any]:
    half = round(ms * 0.5e6)
    spent = dict.fromkeys((f"{phase}_ns" for phase in PHASES), 0)
    spent |= {"forward_ns": half, "backward_ns": half}
    return {"step": step, "wall_ns": 2 * half, **spent, "window": False, **marks}


def _wait_for_data(row: dict[str, Any], ms: float) -> None:
    """The rest of the step is forward and backward."""
    data = round(ms * 1e6)
    half = (row["wall_ns"] - data) // 2
    row |= {"data_ns": data, "forward_ns": half, "backward_ns": row["wall_ns"] - data - half}


def noisy(ms: float, steps: int = 200, seed: int = 0, noise: float = 0.02) -> list[float]:
    draws = np.random.default_rng(seed).standard_normal(steps)
    return [float(each) for each in ms * np.exp(noise * draws)]
