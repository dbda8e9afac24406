"""Do one thing with every workload of the suite: several beside each other, each timed alone.

Each workload has a process of its own, which saves its result to DIR/NAME.json as soon as there is
something to save. Workloads whose result is there and whole are left out, so that a command that
was cut can be given again. In the end DIR.json, beside DIR, holds all results in one file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from library_turn import Turns, children_of, signal_all
from stepscope.bench.catalogue import load, names
from stepscope.bench.request import EXTRA
from stepscope.bench.workload import SIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from device_room import Room

Result = dict[str, Any]
RUNS = "runs"
_LEAST_S = 15.0  # a workload that has less is not begun


def options_for(about: str | None, out: str) -> argparse.ArgumentParser:
    """`out` is a folder's name under benchmarks/results."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="workloads; the whole suite without any")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/{out}"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all workloads")
    parser.add_argument(
        "--per-workload",
        type=float,
        default=300.0,
        help="seconds at most for one, waiting for its turns included",
    )
    parser.add_argument(
        "--at-once", type=int, default=1, help="workloads beside each other; each is timed alone"
    )
    parser.add_argument("--again", action="store_true", help="also those that --out holds")
    parser.add_argument(
        "--keep-runs", action="store_true", help="keep the run folders, which hold large traces"
    )
    parser.add_argument(
        "--turns", type=Path, default=Path(tempfile.gettempdir()) / "stepscope-bench-turns"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def suite() -> tuple[str, ...]:
    return tuple(name for name in names() if EXTRA not in load(name).tags)


def run_each(options: argparse.Namespace, one: Callable[[str, argparse.Namespace], None]) -> bool:
    """True in the process that started the others, when all of them have ended."""
    if options.one:
        one(options.one, options)
        return False
    end = time.monotonic() + options.seconds
    kept = {} if options.again else read(options.out)
    waiting = [name for name in options.names or suite() if not kept.get(name, {}).get("finished")]
    turns = Turns(options.turns)
    with turns.kept_going(), ThreadPoolExecutor(options.at_once) as pool:
        for name, why in pool.map(lambda name: (name, _start(name, options, end)), waiting):
            print(f"{name}: {why or 'done'}", file=sys.stderr)
    results = read(options.out)
    beside(options.out).write_text(json.dumps(results))
    if not options.keep_runs:
        shutil.rmtree(options.out / RUNS, ignore_errors=True)  # of workloads that were stopped
    return True


def beside(out: Path) -> Path:
    """The file with all results."""
    return out.with_name(f"{out.name}.json")


@contextlib.contextmanager
def run_folder(name: str, options: argparse.Namespace) -> Iterator[Path]:
    """Where runs are captured; deleted afterwards unless they are to be kept."""
    folder = options.out / RUNS / f"{name}-{time.time_ns()}"
    try:
        yield folder
    finally:
        if not options.keep_runs:
            shutil.rmtree(folder, ignore_errors=True)


def _start(name: str, options: argparse.Namespace, end: float) -> str | None:
    """Why the workload has no whole result, or None."""
    limit_s = min(options.per_workload, end - time.monotonic())
    if limit_s < _LEAST_S:
        return "not begun: no time left"
    command = [sys.executable, *sys.argv, "--one", name]
    child = subprocess.Popen(command, stdout=sys.stderr)  # our own output is the tables alone
    code = wait_or_kill(child, limit_s)
    if code is None:
        return f"stopped after {limit_s:.0f} s; what was measured until then is kept"
    return f"exit code {code}" if code else None


def wait_or_kill(child: subprocess.Popen[Any], limit_s: float) -> int | None:
    """Its exit code; None past the limit. Its trainings are killed with it: one that was stopped to
    leave the device to another workload would keep its memory for ever."""
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        signal_all([*children_of(child.pid), child.pid], signal.SIGKILL)
        child.wait()
        return None


class Stopwatch:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.spent_s[what] = self.spent_s.get(what, 0.0) + time.monotonic() - began


def waits(turns: Turns, room: Room) -> dict[str, float]:
    """Seconds that a workload had the device alone, or waited for it. While another one has it
    alone, a workload is stopped, which is part of whatever it does."""
    return {
        "having the device alone": turns.alone_s,
        "waiting for the device": turns.waited_s,
        "waiting for memory": room.waited_s,
    }


def spent_on(results: dict[str, Result]) -> Iterator[str]:
    """In sentences: the mean of all workloads and the largest, by what the time was spent on."""
    for what in dict.fromkeys(what for one in results.values() for what in one.get("spent_s", {})):
        spent = {name: one.get("spent_s", {}).get(what, 0.0) for name, one in results.items()}
        longest = max(spent, key=lambda name: spent[name])
        total = sum(spent.values())
        yield (
            f"seconds for {what}: {total:.0f} in all, {total / len(spent):.1f} a workload, most "
            f"{longest} ({spent[longest]:.1f})"
        )


def read(out: Path) -> dict[str, Result]:
    """What is known, by workload: from the folder, or from the file with all results."""
    if out.is_file():
        results: dict[str, Result] = json.loads(out.read_text())
        return results
    return {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}


def save(out: Path, name: str, result: Result) -> None:
    out.mkdir(parents=True, exist_ok=True)
    new = out / f"{name}.new"
    new.write_text(json.dumps(result, indent=1))
    new.replace(out / f"{name}.json")
