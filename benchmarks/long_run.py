"""Writes the run folder of a long training: every step, with several causes of stalls.

    python benchmarks/long_run.py FOLDER [--steps 1000000] [--ranks 1] [--step-ms 100]

Steps take --step-ms, each phase varies by 1%. Every fourth step waits for data, every 1,000th is
followed by an evaluation and every 5,000th by a checkpoint; one in 400 holds a garbage collection.
An epoch has 20,000 steps. After 60% of the run a step takes 15% longer. Lines pass through the same
code that packs them while a model trains. The rest of the folder is a recording of the tests.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from stepscope.measure.writer import BLOCK, StepPacking, append_lines

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "cpu-two-ranks"
BEGAN_NS = 1_794_784_054_000_000_000
START_UP_NS = 6_000_000_000
EVALUATION, CHECKPOINT, EPOCH = 1000, 5000, 20_000
WINDOW = range(12, 15)
_OF_ONE_STEP = {"data": 0.01, "forward": 0.30, "backward": 0.55, "optimizer": 0.10}


def write_run(folder: Path, steps: int, ranks: int, step_ms: float) -> None:
    ended = BEGAN_NS
    for rank in range(ranks):
        place = folder / f"rank-{rank:05d}"
        _copy_rank(place, rank, ranks, steps)
        ended = max(ended, write_steps(place / "steps.jsonl", steps, step_ms, seed=rank))
    _write_run_file(folder, ranks, ended + 2_000_000_000)


def _copy_rank(place: Path, rank: int, ranks: int, steps: int) -> None:
    """The recording's rank 0, as this rank of a job of so many."""
    source = GOLDEN / "rank-00000"
    place.mkdir(parents=True)
    facts = json.loads((source / "rank.json").read_text())
    facts |= {"rank": rank, "world_size": ranks, "steps": steps}
    (place / "rank.json").write_text(json.dumps(facts))
    text = gzip.decompress((source / "trace.json.gz").read_bytes())
    text = re.sub(
        rb'"rank": 0, "world_size": 2', b'"rank": %d, "world_size": %d' % (rank, ranks), text
    )
    (place / "trace.json.gz").write_bytes(gzip.compress(text))
    shutil.copy(source / "memory.json", place)


def write_steps(tail: Path, steps: int, step_ms: float, *, seed: int) -> int:
    """Returns when the last step ended."""
    draw = np.random.default_rng(seed)
    packing = StepPacking(tail)
    end = BEGAN_NS + START_UP_NS
    for first in range(0, steps, BLOCK):
        count = min(BLOCK, steps - first)
        columns = _columns(draw, np.arange(first, first + count), steps, step_ms)
        ends = end + np.cumsum(columns["wall_ns"])
        columns["end_unix_ns"], end = ends, int(ends[-1])
        append_lines(tail, _lines(columns), alone=True)
        packing.wrote(count)
        while packing.is_busy:
            packing.go_on()
    packing.close()
    return end


def _columns(
    draw: np.random.Generator, number: np.ndarray, steps: int, step_ms: float
) -> dict[str, np.ndarray]:
    """In the order of a line's fields; what is zero there is left out of it."""
    n = len(number)
    typical = 1e6 * step_ms * np.exp(0.01 * draw.standard_normal(n))
    typical *= np.where(number >= 0.6 * steps, 1.15, 1.0)
    phases = {
        name: typical * share * np.exp(0.01 * draw.standard_normal(n))
        for name, share in _OF_ONE_STEP.items()
    }
    phases["data"] += np.where(number % 4 == 3, 0.5e6 * step_ms * draw.uniform(0.9, 1.1, n), 0.0)
    after = number > 0
    rare = {
        "evaluation": after & (number % EVALUATION == 0),
        "checkpoint": after & (number % CHECKPOINT == 0),
        "gc": draw.random(n) < 1 / 400,
        "between_epochs": after & (number % EPOCH == 0),
    }
    long_as = {"evaluation": 20, "checkpoint": 30, "gc": 1.5, "between_epochs": 0.5}
    for name, when in rare.items():
        phases[name] = np.where(when, 1e6 * step_ms * long_as[name], 0.0)
    phases["other"] = typical - sum(typical * share for share in _OF_ONE_STEP.values())
    whole = {f"{name}_ns": spent.astype(np.int64) for name, spent in phases.items()}
    gap = np.where(rare["between_epochs"], sum(whole[f"{name}_ns"] for name in rare), 0)
    return {
        "step": number,
        "wall_ns": sum(whole.values(), np.zeros(n, np.int64)),
        **whole,
        "epoch_gap_ns": gap - np.where(rare["between_epochs"], whole["gc_ns"], 0),
        "elements": 32 * 512 + 32 * draw.integers(0, 512, n),
        "allocated_bytes": 20_000_000_000 + 4096 * draw.integers(0, 1000, n),
        "cpu_wait_ns": draw.integers(0, 200_000, n),
        "window": np.isin(number, WINDOW),
        "first": number == 0,
    }


_USUAL = ("step", "wall_ns", *(f"{name}_ns" for name in (*_OF_ONE_STEP, "other")), "end_unix_ns")


def _lines(columns: dict[str, np.ndarray]) -> list[str]:
    names = list(columns)
    rows = zip(*(columns[name].tolist() for name in names), strict=True)
    return [json.dumps(_fields(names, row)) for row in rows]


def _fields(names: list[str], row: tuple[Any, ...]) -> dict[str, Any]:
    return {
        name: value
        for name, value in zip(names, row, strict=True)
        if value or name in (*_USUAL, "window")
    }


def _write_run_file(folder: Path, ranks: int, ended_ns: int) -> None:
    facts = json.loads((GOLDEN / "run.json").read_text())
    facts |= {"started_unix": BEGAN_NS / 1e9, "ended_unix": ended_ns / 1e9, "world_size": ranks}
    facts["ranks"] = [
        json.loads((folder / f"rank-{rank:05d}" / "rank.json").read_text())
        | {"folder": f"rank-{rank:05d}", "captured": [], "missing": {}, "problems": []}
        for rank in range(ranks)
    ]
    (folder / "run.json").write_text(json.dumps(facts))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=100.0)
    options = parser.parse_args()
    write_run(options.folder, options.steps, options.ranks, options.step_ms)


if __name__ == "__main__":
    main()
