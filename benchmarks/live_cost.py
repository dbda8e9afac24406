"""What following a run costs: inside the job, and in the process that follows.

    python benchmarks/live_cost.py [--ranks 8] [--steps 20000]

Inside the job, a look for a request in the writer's thread, once per flush: its time, and that time
as a share of the flush interval. In `serve`, a look at a run folder with news of every rank.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from stepscope.measure.profiler.extra_windows import WindowRequests
from stepscope.measure.profiler.schedule import Schedule
from stepscope.measure.settings import Settings
from stepscope.measure.writer import FLUSH_S
from stepscope.records.folders import this_process
from stepscope.ui.serve.job_follower import RunLooks, encode

LOOKS = 20_000
STEP_NS = 10_000_000


class Training:
    """What a request needs of a session."""

    def __init__(self, folder: Path) -> None:
        self.number = 1000
        self.settings = Settings(folder=str(folder))

    def wake(self, step: int) -> None:
        raise AssertionError(step)


def look_for_request_us(folder: Path) -> float:
    training = Training(folder)
    requests = WindowRequests(training, Schedule.plan(training.settings), folder, FLUSH_S)
    times = []
    for _ in range(LOOKS):
        training.number += 1
        began = time.perf_counter_ns()
        requests.look()
        times.append(time.perf_counter_ns() - began)
    return median(times) / 1e3


def step_lines(first: int, count: int) -> str:
    began = time.time_ns() - count * STEP_NS
    return "".join(
        json.dumps(
            {
                "step": first + place,
                "wall_ns": STEP_NS + (place * 7919) % 100_000,
                "forward_ns": STEP_NS,
                "end_unix_ns": began + place * STEP_NS,
                "window": False,
            }
        )
        + "\n"
        for place in range(count)
    )


def look_at_run_ms(folder: Path, ranks: int, steps: int, looks: int = 30) -> tuple[float, float]:
    """Median and longest, with ten new steps per rank in every look."""
    identity = this_process()
    process = {name: getattr(identity, name) for name in identity.__dataclass_fields__}
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"status": "running", "process": process}))
    places = [folder / f"rank-{rank:05d}" for rank in range(ranks)]
    for rank, place in enumerate(places):
        place.mkdir()
        facts = {"rank": rank, "world_size": ranks, "status": "running", "process": process}
        (place / "rank.json").write_text(json.dumps(facts))
        (place / "steps.jsonl").write_text(step_lines(0, steps))
    run = RunLooks(folder)
    run.look(0.0, time.time())
    times = []
    for number in range(looks):
        for place in places:
            with (place / "steps.jsonl").open("a") as file:
                file.write(step_lines(steps + 10 * number, 10))
        began = time.perf_counter()
        view = run.look(0.1 * (number + 1), time.time())
        assert view is not None
        encode(view)
        times.append(1e3 * (time.perf_counter() - began))
    return median(times), max(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        cost_us = look_for_request_us(Path(name))
        print(f"look for a request   {cost_us:.1f} us, {cost_us / 1e4 / FLUSH_S:.5f}% of the time")
        usual, longest = look_at_run_ms(Path(name) / "run", options.ranks, options.steps)
        print(f"look at a run        {usual:.1f} ms, longest {longest:.1f} ms")


if __name__ == "__main__":
    main()
