"""How often a slow host, a slow link and a slow rank are told apart, and nobody is accused.

    python -m benchmarks.hosts --runs 10 --shapes 2x2 4x1 --plants even slow-link

Each run is one DDP training on hosts made of namespaces (tests/hosts/lab.py; needs root), captured
by `stepscope run` on every host into one folder. A shape is hosts x ranks on each. The planted rank
or host changes from run to run. Runs of all plants alternate, so that a busy hour of the machine
meets all of them.

A run counts as right when the planted one, and nothing else, is named with its scope. Where a host
has one rank only, a slow rank and a slow host are the same thing, and either scope is right.
Between two hosts there is one link, whichever end is slow. There it is slow in one direction only:
with both alike, nothing could be compared with anything.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

TESTS = Path(__file__).parent.parent / "tests/hosts"
sys.path.insert(0, str(TESTS))

from lab import Lab, why_not  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = ("2x1", "2x2", "4x1", "4x2")
STEPSCOPE = (sys.executable, "-m", "stepscope")
Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Planted:
    """What is wrong in one run: the rank and the host that are slow, if their plant says so."""

    plant: str
    hosts: int
    ranks: int  # on each host
    rank: int
    host: str

    @property
    def variables(self) -> dict[str, str]:
        slow = {"slow-rank": {"SLOW_RANK": str(self.rank)}, "slow-host": {"SLOW_HOST": self.host}}
        return slow.get(self.plant, {})

    def is_named_by(self, entry: Entry) -> bool:
        return NAMED[self.plant](self, entry)


def is_rank(planted: Planted, entry: Entry) -> bool:
    if entry["scope"] == "host":
        return planted.ranks == 1 and entry["host"] == f"node{planted.rank}"
    return entry["scope"] == "rank" and entry["rank"] == planted.rank


def is_host(planted: Planted, entry: Entry) -> bool:
    if entry["scope"] == "rank":
        return planted.ranks == 1 and f"node{entry['rank']}" == planted.host
    return entry["scope"] == "host" and entry["host"] == planted.host


def is_link(planted: Planted, entry: Entry) -> bool:
    if (entry["scope"], entry["cause"]) != ("link", "link"):
        return False
    if planted.hosts == 2:
        return planted.host in (entry["link"] or [entry["host"] or planted.host])
    return entry["host"] == planted.host


NAMED: dict[str, Callable[[Planted, Entry], bool]] = {
    "even": lambda _planted, _entry: False,
    "slow-rank": is_rank,
    "slow-host": is_host,
    "slow-link": is_link,
}


def main() -> None:
    options = parse()
    reason = why_not()
    if reason:
        raise SystemExit(f"no hosts can be made here: {reason}")
    counts = {
        (plant, shape): Counter[str]() for shape in options.shapes for plant in options.plants
    }
    for number in range(options.first, options.first + options.runs):
        for plant, shape in counts:
            began = time.monotonic()
            outcome, about = run_once(plant, shape, number, options)
            counts[plant, shape][outcome] += 1
            took = f"{time.monotonic() - began:.0f} s"
            now = time.strftime("%H:%M:%S")
            print(f"{now} {plant} {shape} {number}: {outcome} ({took}); {about}", flush=True)
    print(f"\n{'plant':12}{'hosts x ranks':>15}{'runs':>8}{'right':>8}{'silent':>8}{'wrong':>8}")
    for (plant, shape), outcomes in counts.items():
        cells = [outcomes.total(), outcomes["right"], outcomes["silent"], outcomes["wrong"]]
        print(f"{plant:12}{shape:>15}{''.join(f'{cell:>8}' for cell in cells)}")


def run_once(plant: str, shape: str, number: int, options: argparse.Namespace) -> tuple[str, str]:
    hosts, ranks = map(int, shape.split("x"))
    planted = Planted(
        plant=plant,
        hosts=hosts,
        ranks=ranks,
        rank=number % (hosts * ranks),
        host=f"node{number % hosts}",
    )
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        run = Path(folder) / "run"
        train(planted, run, options)
        stragglers = explain(run)["stragglers"]
        if options.keep:
            shutil.copytree(run, Path(options.keep) / f"{plant}-{shape}-{number}")
    where = {"slow-rank": f"rank {planted.rank}", "even": "nobody"}.get(plant, planted.host)
    return judge(planted, stragglers["ranks"]), f"{where} planted: {describe(stragglers)}"


def train(planted: Planted, run: Path, options: argparse.Namespace) -> None:
    """One job on all hosts; all of them capture into `run`."""
    env = {
        "STEPS": str(options.steps),
        "WORK_MS": "20",
        "SLOW_MS": str(options.slow_ms),
        "WIDTH": "256",
        **planted.variables,
    }
    around = [*STEPSCOPE, "run", "--out", str(run), "--no-explain", "--quiet", "--"]
    with Lab(hosts=planted.hosts) as lab:
        if planted.plant == "slow-link":
            direction = "out" if planted.hosts == 2 else "both"
            lab.shape(planted.host, options.link, direction)
        job = lab.torchrun([str(TESTS / "train.py")], ranks=planted.ranks, env=env, around=around)
        for name, process in job.items():
            outcome = process.wait(600)
            if outcome.code:
                raise SystemExit(f"{name} ended with {outcome.code}:\n{outcome.stderr[-3000:]}")


def explain(run: Path) -> dict[str, Any]:
    command = [*STEPSCOPE, "explain", str(run), "--json", "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def judge(planted: Planted, named: list[Entry]) -> str:
    """Right, silent (nothing was named that should be) or wrong (something else was named)."""
    if any(not planted.is_named_by(entry) for entry in named):
        return "wrong"
    if planted.plant == "even" or named:
        return "right"
    return "silent"


def describe(stragglers: dict[str, Any]) -> str:
    named = []
    for entry in stragglers["ranks"]:
        names = {"rank": entry["rank"], "host": entry["host"], "link": entry["link"]}
        who = f"{entry['scope']} {names[entry['scope']]}"
        named.append(f"{who} {entry['cause']} (costs {entry['cost_ms'] or 0:.1f} ms)")
    return ", ".join(named) or stragglers["detail"] or stragglers["verdict"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--slow-ms", type=int, default=8, help="more work than the others' 20 ms")
    parser.add_argument("--link", default="200mbit", help="the slow link's rate")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--plants", nargs="+", choices=list(NAMED), default=list(NAMED))
    parser.add_argument("--keep", help="a folder for the captures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
