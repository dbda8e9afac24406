"""How often the right rank is named: real jobs with a rank that is late on purpose, or with none.

    python -m benchmarks.stragglers_every_step --runs 20 --plants constant nobody

Each run is `stepscope run -- torchrun --nproc-per-node=4` with default options. A run counts as
right when the planted rank, and no other, is named, with the planted cause and kind; with nobody
planted, when nobody is named; with a wandering lateness, when that is reported and nobody named.
Runs of all plants alternate, so that a busy hour of the machine meets all of them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "workloads/late_rank.py"
RANKS = 4
PLANTS: dict[str, list[str]] = {
    "nobody": [],
    "constant": ["--share", "0.1"],
    "constant-input": ["--share", "0.1", "--cause", "input"],
    "intermittent": ["--late-ms", "200", "--one-in", "20"],
    "wandering": ["--late-ms", "200", "--one-in", "20"],
}


def main() -> None:
    options = parse()
    counts = {plant: Counter[str]() for plant in options.plants}
    for number in range(options.runs):
        for plant in options.plants:
            outcome, about = run_once(plant, number, options)
            counts[plant][outcome] += 1
            print(f"{time.strftime('%H:%M:%S')} {plant} {number}: {outcome}; {about}", flush=True)
    print(f"\n{'plant':16}{'runs':>6}{'right':>7}{'silent':>8}{'wrong':>7}")
    for plant, outcomes in counts.items():
        columns = outcomes["right"], outcomes["silent"], outcomes["wrong"]
        print(f"{plant:16}{sum(outcomes.values()):>6}{columns[0]:>7}{columns[1]:>8}{columns[2]:>7}")


def run_once(plant: str, number: int, options: argparse.Namespace) -> tuple[str, str]:
    late = number % RANKS
    kind, _, cause = plant.partition("-")
    with tempfile.TemporaryDirectory(prefix="stragglers-") as folder:
        run = Path(folder) / "run"
        script = [str(SCRIPT), "--plant", kind, "--rank", str(late), "--seed", str(number)]
        script += [*PLANTS[plant], "--steps", str(options.steps)]
        launch = [torchrun(), "--standalone", f"--nproc-per-node={RANKS}", *script]
        stepscope("run", "--out", str(run), "--no-explain", "--", *launch)
        explained = json.loads(stepscope("explain", str(run), "--json"))
        if options.keep:
            shutil.copytree(run, Path(options.keep) / f"{plant}-{number}")
    stragglers = explained["stragglers"]
    return judge(kind, cause or "compute", late, stragglers), describe(stragglers)


def judge(kind: str, cause: str, late: int, stragglers: dict[str, Any]) -> str:
    """Right, silent (nobody was named who should be) or wrong (somebody was who should not)."""
    named = stragglers["ranks"]
    if any(one["rank"] != late or kind in ("nobody", "wandering") for one in named):
        return "wrong"
    if kind == "nobody":
        return "right"
    if kind == "wandering":
        return "right" if stragglers["wandering"] else "silent"
    if not named:
        return "silent"
    return "right" if (named[0]["kind"], named[0]["cause"]) == (kind, cause) else "wrong"


def describe(stragglers: dict[str, Any]) -> str:
    late = [
        f"rank {one['rank']} {one['kind']} {one['cause']} {one['excess_ms'] or 0:.1f} ms "
        f"(costs {one['cost_ms']:.1f})"
        for one in (*stragglers["ranks"], *filter(None, [stragglers.get("wandering")]))
    ]
    return ", ".join(late) or stragglers["detail"] or stragglers["verdict"]


def stepscope(*arguments: str) -> str:
    command = [sys.executable, "-m", "stepscope", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def torchrun() -> str:
    return str(Path(sys.executable).with_name("torchrun"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plants", nargs="+", choices=PLANTS, default=list(PLANTS))
    parser.add_argument("--keep", help="a folder for the captures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
