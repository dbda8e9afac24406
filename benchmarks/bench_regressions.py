"""Whether `bench --against` finds a slow-down of 5%, and keeps silent where nothing changed.

python benchmarks/bench_regressions.py simulate                      made-up machines: how many runs
python benchmarks/bench_regressions.py real --tries 20 [ncf dlrm]    real benches, a planted delay

The real benches save one base. Each try benches the same code against it, then a copy of stepscope
in which the step of each workload takes 5% longer: it sleeps, or computes (--planted busy). It
exits with 1 if a planted delay was missed, or if more than one try in twenty raised an alarm about
the same code.
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
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import stepscope
from process import environment
from stepscope.bench import catalogue
from stepscope.bench.against import EnoughRuns
from stepscope.bench.results import BenchResults, WorkloadResult
from stepscope.bench.rules import CLAIM_RUNS
from stepscope.bench.run_change import run_change, usual_variance
from stepscope.text.figures import percent, signed_percent

if TYPE_CHECKING:
    from collections.abc import Callable

PLANTED, LIMIT = 0.05, 0.03
SLOWER, NOT_COMPARABLE = 5, 4  # exit codes; the latter also where the machine itself became slower
STARTS = (0.005, 0.01, 0.02, 0.03)  # deviation from start to start
RUNS = (3, 5, 7, 9)
SUITE = 24  # workloads
RUN_S = 4.0  # that a made-up run takes
RESTLESS = 0.5  # deviation of the logarithm of how much a workload's runs differ
# Appended to a workload's file: its steps take longer.
DELAY = """

import dataclasses as _dataclasses
import time as _time


def _delayed(build):
    def build_slower(config, place):
        step = build(config, place)

        def slower(number):
            start = _time.thread_time()
            loss = step(number)
            {delay}
            return loss

        return slower

    return build_slower


{record} = _dataclasses.replace({record}, build=_delayed({record}.build))
"""


# Of what the step computes: while it queues for a core, it takes longer than it would.
SLEEP = "_time.sleep({share!r} * (_time.thread_time() - start))"
BUSY = """end = start + (1 + {share!r}) * (_time.thread_time() - start)
            while _time.thread_time() < end:
                pass"""
DELAYS = {"sleep": SLEEP, "busy": BUSY}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("simulate", "real"))
    parser.add_argument("workloads", nargs="*", default=["ncf", "dlrm"])
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--planted", choices=DELAYS, default="sleep", help="what the 5%% do")
    parser.add_argument("--runs", type=int, help="of each workload; as many as needed without it")
    parser.add_argument("--benches", type=int, default=2000, help="simulated ones for each number")
    parser.add_argument("--json", type=Path, help="write every change of every try here")
    options = parser.parse_intermixed_args()
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
    rule = EnoughRuns(workloads=1, base=None if base is None else results(base))
    runs: list[float] = []
    while len(runs) < CLAIM_RUNS or not rule.are_there(results(runs).workloads[0]):
        runs.append(math.exp(session + spread * draw.normal()))
    return runs


def results(runs: list[float]) -> BenchResults:
    row = WorkloadResult(
        name="made-up", size="tiny", runs_ms=tuple(runs), seconds=RUN_S * len(runs)
    )
    return BenchResults(stepscope="", command=(), started_unix=0.0, workloads=(row,))


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
    tries: dict[str, list[dict]] = {"same": [], "planted": []}
    void: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.monotonic()
        saved, _, base = measure_base(options.workloads, options.runs, folder)
        print(f"base: {time.monotonic() - began:.0f} s, {runs_made(saved)}", flush=True)
        planted = folder / "planted"
        plant([row["name"] for row in saved["workloads"]], planted, options.planted)
        while min(map(len, tries.values())) < options.tries:
            for kind, code in (("same", None), ("planted", planted)):
                one = one_try(options, folder, base, code)
                if one["code"] == NOT_COMPARABLE:
                    void[kind] += 1
                    print(f"{kind}: the machine itself changed, this does not count", flush=True)
                elif len(tries[kind]) < options.tries:
                    tries[kind].append(one)
                    print(f"{kind} {len(tries[kind])}: {words(one['rows'])}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(tries))
    return conclude(tries, void, options)


def measure_base(workloads: list[str], runs: int | None, folder: Path) -> tuple[dict, int, Path]:
    base = folder / "base.json"
    return *bench(workloads, runs, folder, "--save", str(base)), base


def one_try(options: argparse.Namespace, folder: Path, base: Path, code: Path | None) -> dict:
    limit = ("--against", str(base), "--fail-on-slower", str(LIMIT))
    began = time.monotonic()
    answer, exit_code = bench(options.workloads, options.runs, folder, *limit, code=code)
    return {
        "rows": answer["against"]["workloads"],
        "runs": runs_made(answer),
        "code": exit_code,
        "seconds": time.monotonic() - began,
    }


def conclude(tries: dict[str, list[dict]], void: Counter[str], options: argparse.Namespace) -> int:
    def of(kind: str, holds: Callable[[dict], bool]) -> str:
        return f"{sum(map(holds, tries[kind]))} of {len(tries[kind])}"

    def slower(row: dict) -> bool:
        return row["verdict"] == "slower"

    def stopped(one: dict) -> bool:
        return one["code"] == SLOWER

    all_slower = of("planted", lambda one: all(map(slower, one["rows"])))
    any_slower = of("same", lambda one: any(map(slower, one["rows"])))
    print(f"planted {percent(PLANTED)} ({options.planted}): all workloads slower in {all_slower},")
    print(f"  --fail-on-slower {percent(LIMIT)} stopped {of('planted', stopped)}")
    print(f"same code: --fail-on-slower stopped {of('same', stopped)},")
    print(f'  a workload was called "slower" in {any_slower}')
    for kind, ones in tries.items():
        seconds = np.median([one["seconds"] for one in ones])
        print(f"{kind}: {seconds:.0f} s a try; not counted, as the machine changed: {void[kind]}")
    missed = not all(map(stopped, tries["planted"]))
    return int(missed or sum(map(stopped, tries["same"])) > len(tries["same"]) // 20)


def runs_made(answer: dict) -> str:
    return ", ".join(
        f"{row['name']} {len(row['runs_ms'])} + {len(row['paced'])} runs"
        for row in answer["workloads"]
    )


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


def plant(names: list[str], place: Path, delay: str) -> None:
    """A copy of stepscope in which each workload's step takes PLANTED longer."""
    copy = place / "stepscope"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(stepscope.__file__).parent, copy, ignore=ignore)
    for name in names:
        file = copy / "bench/workloads" / f"{catalogue.SUITE[name]}.py"
        record = f"{name.upper().replace('-', '_')}_WORKLOAD"
        with file.open("a") as code:
            code.write(DELAY.format(delay=DELAYS[delay].format(share=PLANTED), record=record))


def words(rows: list[dict]) -> str:
    return ", ".join(
        f"{row['name']} {signed_percent(row['change'])} "
        f"({signed_percent(row['low'])} to {signed_percent(row['high'])})" + waits(row)
        if row["change"] is not None
        else f"{row['name']} {row['why']}"
        for row in rows
    )


def waits(row: dict) -> str:
    part = row["waiting"]
    if part is None:
        return ""
    low, high = signed_percent(part["low"]), signed_percent(part["high"])
    return f", waits {signed_percent(part['change'])} ({low} to {high}), {row['verdict']}"


if __name__ == "__main__":
    sys.exit(main())
