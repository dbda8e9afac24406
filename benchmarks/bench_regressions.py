"""Whether `bench --against` finds a slow-down of 5%, and keeps silent where nothing changed.

python benchmarks/bench_regressions.py simulate                      made-up machines: how many runs
python benchmarks/bench_regressions.py real --tries 20 [ncf dlrm]    real benches, a planted delay

A real try saves a base, benches the same code against it, then a copy of stepscope in which the
step of each workload takes 5% longer. It exits with 1 if a planted delay was missed, or if more
than one try in twenty raised an alarm about the same code.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

import stepscope
from process import environment
from stepscope.bench.enough_runs import MOST_RUNS, sees
from stepscope.bench.rules import CLAIM_RUNS
from stepscope.bench.run_change import run_change, usual_variance
from stepscope.records.figures import percent, signed_percent

PLANTED, LIMIT = 0.05, 0.03
SLOWER, NOT_COMPARABLE = 5, 4  # exit codes; the latter also where the machine itself became slower
STARTS = (0.005, 0.01, 0.02, 0.03)  # deviation from start to start
RUNS = (3, 5, 7, 9)
SUITE = 24  # workloads
RESTLESS = 0.5  # deviation of the logarithm of how much a workload's runs differ
# Appended to a workload's file: its steps take longer, without giving the core away.
DELAY = """

import dataclasses as _dataclasses
import time as _time


def _delayed(build):
    def build_slower(config, place):
        step = build(config, place)

        def slower(number):
            start = _time.perf_counter()
            loss = step(number)
            end = start + {times!r} * (_time.perf_counter() - start)
            while _time.perf_counter() < end:
                pass
            return loss

        return slower

    return build_slower


WORKLOAD = _dataclasses.replace(WORKLOAD, build=_delayed(WORKLOAD.build))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("simulate", "real"))
    parser.add_argument("workloads", nargs="*", default=["ncf", "dlrm"])
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--runs", type=int, help="of each workload; as many as needed without it")
    parser.add_argument("--benches", type=int, default=2000, help="simulated ones for each number")
    parser.add_argument("--json", type=Path, help="write every change of every try here")
    options = parser.parse_args()
    if options.what == "simulate":
        simulate(options.benches)
        return 0
    return try_for_real(options)


def simulate(benches: int) -> None:
    """Shares of made-up benches: a planted slow-down found in one workload, and false alarms."""
    names = " | ".join(f"{runs} runs" for runs in RUNS)
    needed = "as needed: runs | found | false alarms"
    print(f"| starts differ by | workloads | {names} | false alarms, 5 runs | {needed} |")
    print(f"|---|---|{'---|' * (len(RUNS) + 4)}")
    for workloads in (1, 2, SUITE):
        for starts in STARTS:
            draw = np.random.default_rng(0)
            made = [
                [
                    alarms(draw, runs, starts, workloads)
                    for _ in range(max(1, benches * 3 // (workloads + 2)))
                ]
                for runs in RUNS
            ]
            found = " | ".join(percent(np.mean([a for a, _ in shares])) for shares in made)
            false = percent(np.mean([b for _, b in made[1]]))
            cells = [percent(starts), str(workloads), found, false]
            if workloads == 1:
                cells += as_needed(draw, starts, benches)
            print(f"| {' | '.join(cells)} |", flush=True)


def as_needed(draw: np.random.Generator, starts: float, benches: int) -> list[str]:
    """Of benches of one workload that make as many runs as they need: runs of the base, slow-downs
    of PLANTED that raise the alarm, and false alarms."""
    outcomes = []
    for _ in range(benches):
        spread = starts * np.exp(draw.normal(0.0, RESTLESS))
        base = enough_runs(draw, spread, None)
        now = enough_runs(draw, spread, base)
        slower = [(1 + PLANTED) * ms for ms in now]
        raised = [alarm(base, runs, 1, None) for runs in (slower, now)]
        outcomes.append((len(base), *raised))
    runs, found, false = np.mean(outcomes, axis=0)
    return [f"{runs:.0f}", percent(found), percent(false)]


def enough_runs(draw: np.random.Generator, spread: float, base: list[float] | None) -> list[float]:
    """By the rule of `bench --save` and `bench --against`."""
    session = draw.normal(0.0, 0.005)
    most = MOST_RUNS if base is None else min(MOST_RUNS, 3 * len(base))
    runs: list[float] = []
    while len(runs) < most:
        runs.append(math.exp(session + spread * draw.normal()))
        if len(runs) >= CLAIM_RUNS and sees(base or runs, runs, workloads=1):
            break
    return runs


def alarm(base: list[float], now: list[float], workloads: int, usual: float | None) -> bool:
    change = run_change(base, now, comparisons=workloads, usual_variance=usual)
    return change is not None and change.low > 0 and change.value > math.log1p(LIMIT)


def alarms(
    draw: np.random.Generator, runs: int, starts: float, workloads: int
) -> tuple[float, bool]:
    """Of one made-up bench: the share of its workloads in which a slow-down is found, if all of
    them have it; and whether there is an alarm if none has it.

    Sessions differ by half a percent, and how restless workloads are by a factor of 1.6.
    """
    spread = starts * np.exp(draw.normal(0.0, RESTLESS, (workloads, 1, 1)))
    logs = spread * draw.normal(0.0, 1.0, (workloads, 2, runs)) + draw.normal(0.0, 0.005, (2, 1))
    pairs = [(base.tolist(), now.tolist()) for base, now in np.exp(logs)]
    usual = usual_variance(pairs)

    def raised(slower: float) -> list[bool]:
        return [
            alarm(base, [(1 + slower) * ms for ms in now], workloads, usual) for base, now in pairs
        ]

    return float(np.mean(raised(PLANTED))), any(raised(0.0))


def try_for_real(options: argparse.Namespace) -> int:
    tries: list[dict] = []
    outcomes: Counter[str] = Counter()
    while len(tries) < options.tries:
        with tempfile.TemporaryDirectory() as folder:
            one = one_try(options.workloads, options.runs, Path(folder))
        if NOT_COMPARABLE in (one["same_code"], one["planted_code"]):
            outcomes["void"] += 1
            print("the machine itself changed: this try does not count", flush=True)
            continue
        tries.append(one)
        number = len(tries)
        outcomes["caught"] += all(row["verdict"] == "slower" for row in one["planted"])
        outcomes["stopped"] += one["planted_code"] == SLOWER
        outcomes["false"] += one["same_code"] == SLOWER
        outcomes["seen"] += any(row["verdict"] == "slower" for row in one["same"])
        print(
            f"try {number}: planted {words(one['planted'])}; same {words(one['same'])}", flush=True
        )
    n = len(tries)
    print(
        f"planted {percent(PLANTED)}: all workloads slower in {outcomes['caught']} of {n} tries, "
    )
    print(f"  --fail-on-slower {percent(LIMIT)} stopped {outcomes['stopped']} of {n}")
    print(f"tries that did not count, as the machine itself changed: {outcomes['void']}")
    print(f"same code: --fail-on-slower stopped {outcomes['false']} of {n}, ")
    print(f'  a workload was called "slower" in {outcomes["seen"]} of {n}')
    if options.json:
        options.json.write_text(json.dumps(tries))
    return int(outcomes["stopped"] < n or outcomes["false"] > n // 20)


def one_try(workloads: list[str], runs: int | None, folder: Path) -> dict:
    base = folder / "base.json"
    saved, _ = bench(workloads, runs, folder, "--save", str(base))
    limit = ("--against", str(base), "--fail-on-slower", str(LIMIT))
    same, same_code = bench(workloads, runs, folder, *limit)
    plant([row["name"] for row in saved["workloads"]], folder / "planted")
    planted, planted_code = bench(workloads, runs, folder, *limit, code=folder / "planted")
    return {
        "same": same["against"]["workloads"],
        "same_code": same_code,
        "planted": planted["against"]["workloads"],
        "planted_code": planted_code,
    }


def bench(
    workloads: list[str], runs: int | None, folder: Path, *options: str, code: Path | None = None
) -> tuple[dict, int]:
    """The JSON of one bench and its exit code; `code` is where another stepscope lies."""
    words = [sys.executable, "-m", "stepscope", "bench", *workloads, "--json"]
    words += ["--runs", str(runs)] if runs else []
    done = subprocess.run(
        [*words, "--quiet", "--out", tempfile.mkdtemp(dir=folder) + "/runs", *options],
        env=environment(**({"PYTHONPATH": _before_others(code)} if code else {})),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, SLOWER, NOT_COMPARABLE):
        raise SystemExit(f"bench ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout), done.returncode


def _before_others(code: Path) -> str:
    return os.pathsep.join([str(code), *filter(None, [os.environ.get("PYTHONPATH")])])


def plant(names: list[str], place: Path) -> None:
    """A copy of stepscope in which each workload's step takes PLANTED longer."""
    copy = place / "stepscope"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(stepscope.__file__).parent, copy, ignore=ignore)
    for name in names:
        file = copy / "bench/workloads" / f"{name.replace('-', '_')}.py"
        with file.open("a") as code:
            code.write(DELAY.format(times=1 + PLANTED))


def words(rows: list[dict]) -> str:
    return ", ".join(
        f"{row['name']} {signed_percent(row['change'])} "
        f"({signed_percent(row['low'])} to {signed_percent(row['high'])})"
        if row["change"] is not None
        else f"{row['name']} {row['why']}"
        for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
