"""What capture costs: the same script with and without stepscope, interleaved, compared in pairs.

    python benchmarks/capture.py [--pairs 6] [--json FILE] -- SCRIPT [ARGUMENTS...]

SCRIPT prints a JSON line with `steps_s`, its own step times, and `loss`; with `--slice` also
`ends_s`, when each step ended by the performance counter. It may also print `cpu_s` per step.

Without `--slice` the runs of a pair follow each other. With it they are alive together and take
turns of that many seconds (SIGSTOP, SIGCONT), in a new random order for every round, so that other
work on the machine affects both alike. Steps at the edge of a turn are left out, and so are rounds
in which other processes took more than a tenth of the machine (on Linux). `quiet` is the share of
rounds that is left; a pair with fewer than ten of them is not counted.

Steps outside the window are compared: the mean of a turn's steps without its fastest and slowest
twentieth, the ratio of the two runs in every round, the mean of a pair's rounds without the highest
and the lowest twentieth, and Student's 95% interval of the pairs' mean. (Whole runs are one round.)
`--null` leaves stepscope out of both runs: it shows what the method reports without any difference.
Needs torch and the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

SOURCE = Path(__file__).parent.parent / "src"
WARMUP, ACTIVE = 2, 3
FIRST = 10  # steps before this one warm up
AFTER = 10  # steps after the window in which memory is measured and the trace is compressed
SETTLE_S = 0.03  # at the start of every turn, the caches still hold the other run's data
FOREIGN = 0.1  # share of the cores that others may take in a round
QUIET = 10  # undisturbed rounds that a pair needs
TRIM = 0.05
ENOUGH = 5  # steps of each run in a round
KINDS = ("bare", "captured")
# Student's t for a 95% interval, by degrees of freedom from 1
STUDENT = (
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.23,
    2.20,
    2.18,
    2.16,
    2.14,
    2.13,
)


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stopped runs must not stay
    if options.priority:
        _go_first()
    draw = random.Random(0)
    pairs = []
    for number in range(options.pairs):
        keep = options.keep if number == options.pairs - 1 else None
        with tempfile.TemporaryDirectory() as scratch:
            jobs = [_Job(kind, options, Path(scratch), keep) for kind in KINDS]
            (_take_turns if options.slice else _one_by_one)(jobs, options, draw)
            pairs.append(_compared(*jobs, options))
        print(_line(pairs[-1]), file=sys.stderr)
    result = {**_summary(pairs), "load": os.getloadavg(), "options": _plain_options(options)}
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps({**result, "each": pairs}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--wait", type=int, default=20, help="steps before the window")
    parser.add_argument("--slice", type=float, help="seconds of a turn; else whole runs")
    parser.add_argument("--pin", action="store_true", help="one core for each rank")
    parser.add_argument("--priority", action="store_true", help="before other work on this machine")
    parser.add_argument("--null", action="store_true", help="no stepscope in either run")
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON, for the capture")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="keep the last run folder here")
    parser.add_argument("command", nargs="+")
    return parser.parse_args()


def _plain_options(options: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(options).items() if key not in ("json", "keep")}


# Runs


@dataclass(frozen=True)
class _Turn:
    """When a run was resumed and stopped, and the share of the cores that others took meanwhile."""

    began_s: float
    stopped_s: float
    foreign: float


@dataclass
class _Job:
    """One run: a process for each rank, all in one process group."""

    kind: str
    options: argparse.Namespace
    scratch: Path
    keep: Path | None
    turns: list[_Turn] = field(default_factory=list)
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        environment = self._environment()
        for rank in range(self.options.ranks):
            if self.options.ranks > 1:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            group = self.ranks[0].pid if self.ranks else 0
            self.ranks.append(self._start_rank(rank, environment, group))

    def send(self, what: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.ranks[0].pid, what)

    def running(self) -> bool:
        return all(rank.poll() is None for rank in self.ranks)

    def used_s(self) -> float:
        """Processor time of all ranks so far."""
        return sum(_used_s(rank.pid) for rank in self.ranks)

    def take_turn(self, seconds: float) -> None:
        began, busy, used = time.perf_counter(), _busy_s(), self.used_s()
        self.send(signal.SIGCONT)
        time.sleep(seconds)
        self.send(signal.SIGSTOP)
        stopped = time.perf_counter()
        others = _busy_s() - busy - (self.used_s() - used)
        share = others / (stopped - began) / (os.cpu_count() or 1)
        self.turns.append(_Turn(began, stopped, share))

    def read_output(self) -> dict[str, Any]:
        """What the script printed, after every rank has ended."""
        codes = [rank.wait() for rank in self.ranks]
        if any(codes):
            raise SystemExit(self._output(0, "err").read_text())
        lines = self._output(0, "out").read_text().splitlines()
        printed: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
        return printed

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self.options.ranks > 1:  # what torchrun would set
            environment.setdefault("OMP_NUM_THREADS", "1")
            environment |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(_free_port()),
                "WORLD_SIZE": str(self.options.ranks),
            }
        if self.kind == "captured" and not self.options.null:
            folder = self.keep or self.scratch / "run"
            folder.mkdir(parents=True, exist_ok=True)
            schedule = {"wait": self.options.wait, "warmup": WARMUP, "active": ACTIVE}
            settings = {"folder": str(folder), **schedule, **self.options.settings}
            environment["STEPSCOPE_CAPTURE"] = json.dumps(settings)
            inject = str(SOURCE / "stepscope/measure/inject")
            environment["PYTHONPATH"] = os.pathsep.join((inject, str(SOURCE)))
        return environment

    def _start_rank(
        self, rank: int, environment: dict[str, str], group: int
    ) -> subprocess.Popen[bytes]:
        pin = []
        if self.options.pin:
            cores = sorted(os.sched_getaffinity(0))
            pin = ["taskset", "-c", str(cores[rank % len(cores)])]
        with self._open(rank, "out") as out, self._open(rank, "err") as err:
            return subprocess.Popen(
                [*pin, sys.executable, *self.options.command],
                env=environment,
                stdout=out,
                stderr=err,
                process_group=group,
            )

    def _output(self, rank: int, stream: str) -> Path:
        return self.scratch / f"{self.kind}-{rank}.{stream}"

    def _open(self, rank: int, stream: str) -> IO[bytes]:
        return self._output(rank, stream).open("wb")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _busy_s() -> float:
    """Processor time of all processes of this machine; always 0 without /proc."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _used_s(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _go_first() -> None:
    """Start a session that Linux prefers to the other sessions' work."""
    with contextlib.suppress(PermissionError):
        os.setsid()
    try:
        Path("/proc/self/autogroup").write_text("-19")
    except OSError as error:
        print(f"no priority: {error}", file=sys.stderr)


@contextlib.contextmanager
def _ended(jobs: Sequence[_Job]) -> Iterator[None]:
    """No run outlives the comparison."""
    try:
        yield
    except BaseException:
        for job in jobs:
            if job.ranks:
                job.send(signal.SIGKILL)
        raise


def _one_by_one(jobs: Sequence[_Job], _: argparse.Namespace, draw: random.Random) -> None:
    for job in draw.sample(jobs, len(jobs)):
        with _ended([job]):
            job.start()
            for rank in job.ranks:
                rank.wait()


def _take_turns(jobs: Sequence[_Job], options: argparse.Namespace, draw: random.Random) -> None:
    with _ended(jobs):
        for job in draw.sample(jobs, len(jobs)):
            job.start()
            job.send(signal.SIGSTOP)
        while all(job.running() for job in jobs):
            for job in draw.sample(jobs, len(jobs)):
                job.take_turn(options.slice)
        for job in jobs:  # the one that is not done yet runs alone
            job.send(signal.SIGCONT)
            for rank in job.ranks:
                rank.wait()


# Comparison


def _compared(bare: _Job, captured: _Job, options: argparse.Namespace) -> dict[str, Any]:
    printed = {job.kind: job.read_output() for job in (bare, captured)}
    opens, last = options.wait, len(printed["bare"]["steps_s"])
    before = range(FIRST, opens - 1)
    behind = range(opens + WARMUP + ACTIVE + AFTER, last + 1)
    outside = {*before, *behind}
    every = {job.kind: _rounds(printed[job.kind], job.turns) for job in (bare, captured)}
    wall = _without_others(every, (bare, captured))
    used = {kind: [dict(enumerate(printed[kind].get("cpu_s", ()), 1))] for kind in KINDS}
    plain = {kind: _mean([gap for _, gap in _in(every[kind], outside)]) for kind in KINDS}
    recorded = range(opens + WARMUP, opens + WARMUP + ACTIVE - 1)
    return {
        "steps": min(len(_in(wall[kind], outside)) for kind in KINDS),
        "quiet": len(wall["bare"]) / len(every["bare"]),
        "bare_ms": plain["bare"] * 1e3,
        "captured_ms": plain["captured"] * 1e3,
        "ratio": _ratio(wall, outside),
        "before_ratio": _ratio(wall, before),
        "behind_ratio": _ratio(wall, behind),
        "cpu_ratio": _ratio(used, outside),
        "window_ratio": statistics.median(printed["captured"]["steps_s"][n - 1] for n in recorded)
        / plain["bare"],
        "same_loss": printed["bare"]["loss"] == printed["captured"]["loss"],
        "peak": printed["captured"].get("peak"),
        "bare_peak": printed["bare"].get("peak"),
    }


Rounds = list[dict[int, float]]  # for every turn: the seconds of its steps, by their numbers


def _rounds(printed: dict[str, Any], turns: list[_Turn]) -> Rounds:
    """Steps that lie wholly in a turn; a whole run is one turn. The length of step 0 is unknown."""
    if not turns:
        return [dict(enumerate(printed["steps_s"], 1))]
    ends = printed["ends_s"]
    rounds: Rounds = []
    step = 1
    for turn in turns:
        while step < len(ends) and ends[step - 1] < turn.began_s + SETTLE_S:
            step += 1
        rounds.append({})
        while step < len(ends) and ends[step] < turn.stopped_s:
            rounds[-1][step] = ends[step] - ends[step - 1]
            step += 1
    return rounds


def _without_others(rounds: dict[str, Rounds], jobs: Sequence[_Job]) -> dict[str, Rounds]:
    """Rounds in which both runs had the machine; whole runs as they are."""
    if not jobs[0].turns:
        return rounds
    quiet = [
        number
        for number, turns in enumerate(zip(*(job.turns for job in jobs), strict=False))
        if max(turn.foreign for turn in turns) <= FOREIGN
    ]
    return {kind: [rounds[kind][number] for number in quiet] for kind in KINDS}


def _in(rounds: Rounds, steps: Container[int]) -> list[tuple[int, float]]:
    return [pair for gaps in rounds for pair in gaps.items() if pair[0] in steps]


def _ratio(rounds: dict[str, Rounds], steps: Container[int]) -> float | None:
    """The ratio over rounds in which both runs made enough steps; None without such rounds."""
    logs = []
    for turns in zip(*(rounds[kind] for kind in KINDS), strict=False):
        bare, captured = ([gap for step, gap in turn.items() if step in steps] for turn in turns)
        if min(len(bare), len(captured)) >= ENOUGH:
            logs.append(math.log(_mean(captured) / _mean(bare)))
    enough = QUIET if len(rounds["bare"]) > 1 else 1
    return math.exp(_mean(logs)) if len(logs) >= enough else None


def _mean(values: Sequence[float]) -> float:
    """The mean without the extremes, which come from other work."""
    cut = int(len(values) * TRIM)
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _summary(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "pairs": len(pairs),
        "counted": sum(pair["ratio"] is not None for pair in pairs),
        "steps": sum(pair["steps"] for pair in pairs),
    }
    for name in ("quiet", "bare_ms", "captured_ms", "window_ratio"):
        summary[name] = statistics.median(pair[name] for pair in pairs)
    for name in ("ratio", "before_ratio", "behind_ratio", "cpu_ratio"):
        ratios = [pair[name] for pair in pairs if pair[name] is not None]
        summary[name] = _interval(ratios) if ratios else None
    summary |= summary["ratio"] or {}
    summary["same_loss"] = all(pair["same_loss"] for pair in pairs)
    summary |= {name: pairs[-1][name] for name in ("peak", "bare_peak")}
    return summary


def _interval(ratios: list[float]) -> dict[str, float | None]:
    """The geometric mean and its 95% interval; one pair of runs is one observation."""
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return {"ratio": math.exp(middle), "low": None, "high": None}
    student = STUDENT[min(len(logs) - 1, len(STUDENT)) - 1]
    half = student * statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = math.exp(middle - half), math.exp(middle + half)
    return {"ratio": math.exp(middle), "low": low, "high": high}


def _line(pair: dict[str, Any]) -> str:
    names = ("bare_ms", "quiet", "ratio", "before_ratio", "behind_ratio", "cpu_ratio")
    values = (pair[name] for name in names)
    shown = ("-" if value is None else f"{value:.4f}" for value in values)
    return "  ".join(f"{name} {text}" for name, text in zip(names, shown, strict=True))


if __name__ == "__main__":
    main()
