"""How long `explain` takes for a run of a million steps, how much memory and disk it needs.

    python benchmarks/million_steps.py [--only NAME] [--work DIR] [--keep] [--check]

Three runs: a million steps on one rank, 100,000 on each of 8 ranks, and a month of 1-second steps
(2,592,000) on one rank. Each is explained with `--json` and with `--html`, in fresh processes with
an empty cache. Long runs are made by long_run.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from many_ranks import Cost, measure
from process import environment
from targets import LONG_DISK, LONG_PEAK, LONG_WALL, Result

WRITER = Path(__file__).parent / "long_run.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRun:
    name: str
    steps: int
    ranks: int
    step_ms: float


RUNS = (
    LongRun(name="million", steps=1_000_000, ranks=1, step_ms=100),
    LongRun(name="ranks", steps=100_000, ranks=8, step_ms=100),
    LongRun(name="month", steps=30 * 24 * 3600, ranks=1, step_ms=1000),
)


def explain_run(long: LongRun, work: Path) -> list[Result]:
    folder = work / long.name
    if not folder.exists():
        write(long, folder)
    rank_bytes = max(
        sum(file.stat().st_size for file in rank.iterdir()) for rank in folder.glob("rank-*")
    )
    print(f"{long.name}: {long.ranks} x {long.steps} steps, {rank_bytes / 1e6:.1f} MB a rank")
    answer, report = work / f"{long.name}.json", work / f"{long.name}.html"
    with tempfile.TemporaryDirectory(dir=work) as cache:
        env = environment(STEPSCOPE_CACHE_DIR=cache)
        costs = [
            measure("--json", [str(folder), "--json"], answer, env),
            measure("--html", [str(folder), "--html", str(report)], work / "said.txt", env),
        ]
    for cost, file in zip(costs, (answer, report), strict=True):
        print_cost(cost, file)
    check_answer(answer, long)
    results = [
        Result(target=LONG_WALL, value=costs[0].wall_s),
        Result(target=LONG_DISK, value=rank_bytes / 1e6),
    ]
    if long.steps <= 1_000_000:
        results.append(Result(target=LONG_PEAK, value=peak_bytes(costs[0]) / 1e6))
    return results


def write(long: LongRun, folder: Path) -> None:
    began = time.perf_counter()
    numbers = {"--steps": long.steps, "--ranks": long.ranks, "--step-ms": long.step_ms}
    options = [str(word) for pair in numbers.items() for word in pair]
    subprocess.run([sys.executable, str(WRITER), str(folder), *options], check=True)
    print(f"{long.name}: written in {time.perf_counter() - began:.0f} s")


def peak_bytes(cost: Cost) -> int:
    return max(cost.parent_bytes, cost.worker_bytes)


def print_cost(cost: Cost, file: Path) -> None:
    print(
        f"  {cost.name:<8} {cost.wall_s:5.1f} s (CPU {cost.cpu_s:5.1f} s)   parent "
        f"{cost.parent_bytes / 1e6:4.0f} MB, a worker {cost.worker_bytes / 1e6:.0f} MB   "
        f"writes {file.stat().st_size / 1e6:.1f} MB"
    )


def check_answer(answer: Path, long: LongRun) -> None:
    """Every step was read, and what long_run.py planted was found."""
    explained = json.loads(answer.read_bytes())
    for run in explained["run"]["ranks"]:
        causes = {stall["cause"]: round(stall["cost_ms"], 2) for stall in run["stalls"]}
        print(f"  rank {run['rank']}: {run['steps']} steps, stalls {causes}")
        changes = [(change["step"], round(change["factor"], 3)) for change in with_factor(run)]
        print(f"    changes of level {changes}")
        if run["steps"] != long.steps or not {"data", "evaluation", "checkpoint"} <= {*causes}:
            raise SystemExit("steps or stalls are missing")
    print(f"  verdict  {explained['verdict']}")


def with_factor(run: dict[str, list[dict[str, float]]]) -> list[dict[str, float]]:
    return [
        {**change, "factor": change["after_ms"] / change["before_ms"]} for change in run["changes"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=[long.name for long in RUNS], action="append")
    parser.add_argument("--work", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--keep", action="store_true", help="leave the runs in --work")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    options = parser.parse_args()
    chosen = [long for long in RUNS if not options.only or long.name in options.only]
    if options.keep and options.work:
        options.work.mkdir(parents=True, exist_ok=True)
        results = [result for long in chosen for result in explain_run(long, options.work)]
    else:
        with tempfile.TemporaryDirectory(dir=options.work, prefix="long-runs-") as work:
            results = [result for long in chosen for result in explain_run(long, Path(work))]
    for result in results:
        print(result.row())
    if options.check and not all(result.met for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
