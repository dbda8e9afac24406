"""loader-workers=N against the truth: predictions from one captured run, each number tried bare.

    python benchmarks/loader_promises.py FOLDER [NAME ...] [--rounds 2]

Every script of loader_scripts.py is captured with no workers and with two, and runs bare with 0, 1,
2 and 4 in turns. What is there already is kept, so that the rounds may be spread over quiet times.
Prints the predicted and the measured step over the captured one's, the mean error, and how often
the sign is right: where the measured change is over a tenth, and where the whole interval lies on
one side. A tenth of a change is about what two runs of one script differ by.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

from loader_scripts import SCENARIOS
from stepscope.records.prediction import Setting
from stepscope.ui.advice import open_slowest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.records.prediction import Prediction

SCRIPT = Path(__file__).parent / "loader_scripts.py"
WORKERS, CAPTURED = (0, 1, 2, 4), (0, 2)
CLEAR = 0.1  # of the step: a smaller change has no sign
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(name: str, workers: int) -> list[str]:
    return [sys.executable, str(SCRIPT), name, "--workers", str(workers)]


def run_bare(folder: Path, names: list[str], rounds: int) -> dict[tuple[str, int], list[float]]:
    """Milliseconds per step; every second round goes through the numbers backwards."""
    file = folder / "bare.jsonl"
    known = defaultdict(list)
    for line in file.read_text().splitlines() if file.exists() else ():
        row = json.loads(line)
        known[row["name"], row["workers"]].append(row["step_ms"])
    for number in range(rounds):
        for name in names:
            for workers in WORKERS[:: -1 if number % 2 else 1]:
                if len(known[name, workers]) > number:
                    continue
                done = subprocess.run(
                    command(name, workers), capture_output=True, text=True, check=True,
                    env=ENVIRONMENT, timeout=120,
                )  # fmt: skip
                step_ms = json.loads(done.stdout)["step_ms"]
                known[name, workers].append(step_ms)
                row = {"name": name, "workers": workers, "step_ms": step_ms}
                with file.open("a") as rows:
                    rows.write(json.dumps(row) + "\n")
    return known


def capture(folder: Path, name: str, workers: int) -> Path:
    run = folder / f"{name}-{workers}"
    if not run.exists():
        ours = [sys.executable, "-m", "stepscope", "run", "--no-explain", "--out", str(run), "--"]
        subprocess.run(
            [*ours, *command(name, workers)], check=True, capture_output=True, env=ENVIRONMENT
        )
    return run


def predictions(run: Path, now: int) -> Iterator[tuple[int, Prediction]]:
    bench, _, _ = open_slowest(str(run), cache=False)
    for workers in WORKERS:
        if workers != now:
            yield workers, bench.predict([Setting(name="loader-workers", value=str(workers))])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=2)
    chosen = parser.parse_args()
    names = chosen.names or list(SCENARIOS)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    bare = run_bare(chosen.folder, names, chosen.rounds)
    errors, signs, inside, sure = [], [], [], []
    print("| script, workers | " + " | ".join(f"{count} workers" for count in WORKERS) + " |")
    print("|---" * (1 + len(WORKERS)) + "|")
    for name in names:
        for now in CAPTURED:
            cells = {now: f"{median(bare[name, now]):.2f} ms"}
            for workers, after in predictions(capture(chosen.folder, name, now), now):
                true = median(bare[name, workers]) / median(bare[name, now])
                if after.refused:
                    cells[workers] = "refused"
                    continue
                told = after.predicted_ms / after.baseline_ms
                low, high = (ms / after.baseline_ms for ms in (after.low_ms, after.high_ms))
                errors.append(abs(told / true - 1))
                inside.append(low <= true <= high)
                if low > 1 or high < 1:
                    sure.append((told > 1) == (true > 1))
                if abs(math.log(true)) > CLEAR:
                    signs.append((told > 1) == (true > 1))
                cells[workers] = f"{told:.2f} ({low:.2f}-{high:.2f}), {true:.2f}"
            row = [f"{name}, {now}", *(cells.get(count, "") for count in WORKERS)]
            print(f"| {' | '.join(row)} |")
    print(
        f"{len(errors)} predictions: mean error {mean(errors):.0%}, "
        f"sign right in {sum(signs)} of {len(signs)}, of those that are sure in {sum(sure)} of "
        f"{len(sure)}, inside the interval {mean(inside):.0%}"
    )


if __name__ == "__main__":
    main()
