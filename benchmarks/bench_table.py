"""The suite in five ways of training, in one table, and what was once observed of such workloads.

    python benchmarks/bench_table.py [NAMES] [--size small] [--at-once 6] [--out DIR]
        [--promises DIR] > docs/bench-results.md

Each workload trains in fp32 as it is, with tf32, with bf16, with bf16 and a fused optimizer, and
with those two compiled. Each is captured and explained as `stepscope bench` does it. --promises is
the --out of bench_promises.py: its steps with twice the batch show where throughput saturates.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

import msgspec

from bench_observations import print_observations
from each_workload import Result, options_for, read, run_each, save
from library_table import NOTHING, print_table
from library_turn import Turns
from stepscope.bench.catalogue import load
from stepscope.records.bench_result import WorkloadResult
from stepscope.records.figures import percent, significant, size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from forked_training import ForkedTraining, Window
    from stepscope.bench.task import BenchTask

WAYS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "tf32": ("tf32",),
    "bf16": ("bf16",),
    "bf16+fused": ("bf16", "fused-optimizer"),
    "bf16+fused+compiled": ("bf16", "fused-optimizer", "compile"),
}
LEAST_WAIT, LARGEST_WAIT, PLAIN_S = 12, 40, 1.5  # captured steps before the window, and their time
ROOM_BYTES = 20 << 30  # for the ways of one workload
AFTER = 4  # a plain step, the memory step, and two more
CATEGORIES = ("activations", "parameters", "gradients", "optimizer", "temporaries")


def main() -> None:
    parser = options_for(__doc__, "bench_table")
    parser.add_argument("--promises", type=Path, help="what bench_promises.py has written")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    options = parser.parse_args()
    if unknown := set(options.ways.split(",")) - set(WAYS):
        parser.error(f"--ways: there is no {', '.join(sorted(unknown))}")
    if run_each(options, _one_workload):
        rows = read_rows(read(options.out))
        print_rows(rows)
        print_observations(rows, read(options.promises) if options.promises else {})


# One workload


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOfTask:
    """A workload in one of the ways, and the process that trains it."""

    label: str
    task: BenchTask
    training: ForkedTraining
    window: Window


def _one_workload(name: str, options: argparse.Namespace) -> None:
    from forked_training import Way, Window, forked
    from stepscope.bench.task import BenchTask

    turns = Turns(options.turns)
    turns.enter()
    home = options.out / "runs" / f"{name}-{time.time_ns()}"
    labels = options.ways.split(",")
    ways = [Way(), *(Way(remedies=WAYS[label]) for label in labels)]
    result: Result = {"ways": {}, "finished": False}
    with forked(name, options.size, options.device, ways) as (plain, *trainings):
        plain.build()
        wait = _plain_steps(plain.train(3) / 3)
        facts, peak_bytes = plain.facts(), plain.peak_bytes()
        plain.close()
        result["device"] = facts.device
        rows = [
            WayOfTask(
                label=label,
                task=BenchTask(workload=load(name), size=options.size, remedies=WAYS[label]),
                training=training,
                window=Window(folder=home / label, wait=wait, per_step=facts.captured_per_step),
            )
            for label, training in zip(labels, trainings, strict=True)
        ]
        at_once = _built_at_once(peak_bytes, len(rows))
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            with ThreadPoolExecutor(len(some)) as pool:
                failures = list(pool.map(_build, some))
            for row, failure in zip(some, failures, strict=True):
                measured = _measure(row, turns, failure)
                result["ways"][row.label] = msgspec.to_builtins(measured)
                save(options.out, name, result)
    result["finished"] = True
    save(options.out, name, result)


def _plain_steps(step_s: float) -> int:
    return min(LARGEST_WAIT, max(LEAST_WAIT, round(PLAIN_S / max(step_s, 1e-6))))


def _built_at_once(peak_bytes: int | None, ways: int) -> int:
    """Compilers work beside each other where there is room for what they compile."""
    return ways if not peak_bytes else min(ways, max(1, ROOM_BYTES // peak_bytes))


def _build(row: WayOfTask) -> str | None:
    """Why it cannot train in this way."""
    from forked_training import TrainingFailedError

    try:
        row.training.build(row.window)
        return row.training.facts().not_applied
    except TrainingFailedError as problem:
        return str(problem)


def _measure(row: WayOfTask, turns: Turns, failure: str | None) -> WorkloadResult:
    from forked_training import FIRST, TrainingFailedError
    from stepscope.errors import StepscopeError
    from stepscope.ui.bench.metrics import explain_run, workload_result
    from stepscope.ui.bench.runs import BenchRun, whole_steps
    from stepscope.verify.runs import find_runs
    from stepscope.verify.trial_steps import steady_steps

    window, training = row.window, row.training
    began = time.perf_counter()
    steps = window.traced.stop + AFTER
    try:
        if not failure:
            with turns.alone():
                training.train(steps - FIRST)
            training.close()
            steady = steady_steps(find_runs(str(window.folder))[0].step_ms)
            run = BenchRun(
                number=1,
                folder=window.folder,
                seconds=time.perf_counter() - began,
                steps_ms=whole_steps(steady, window.per_step),
                captured_per_step=window.per_step,
            )
            return workload_result(row.task, [run], explain_run(run))
    except (TrainingFailedError, StepscopeError) as problem:
        failure = str(problem)
    failed = BenchRun(
        number=1, folder=window.folder, seconds=time.perf_counter() - began, failed=failure
    )
    return workload_result(row.task, [failed], None)


# All of them


def read_rows(results: dict[str, Result]) -> dict[str, dict[str, WorkloadResult]]:
    """By workload and way."""
    return {
        name: {
            label: msgspec.convert(row, WorkloadResult)
            for label, row in result.get("ways", {}).items()
        }
        for name, result in results.items()
    }


def print_rows(rows: dict[str, dict[str, WorkloadResult]]) -> None:
    """Markdown: one row for each workload in each way."""
    head = (
        "workload",
        "trained in",
        "samples/s",
        "step",
        "MFU",
        "busy",
        "peak memory",
        *CATEGORIES,
    )
    print_table(
        head,
        [
            _cells(name if place == 0 else "", label, ways[label], ways.get("fp32"))
            for name, ways in rows.items()
            for place, label in enumerate(ways)
        ],
    )
    print()
    for name, ways in rows.items():
        for label, row in ways.items():
            if row.why:
                print(f"- {name} in {label} was not measured: {row.why}")


def _cells(
    name: str, label: str, row: WorkloadResult, plain: WorkloadResult | None
) -> Sequence[str]:
    if row.samples_per_s is None or row.step_ms is None:
        return (name, label, *[NOTHING] * (5 + len(CATEGORIES)))
    gain = ""
    if plain is not None and plain is not row and plain.step_ms:
        gain = f" ({plain.step_ms / row.step_ms:.2f}x)"
    total = sum(row.memory.values())
    return (
        name,
        label,
        f"{significant(row.samples_per_s)} {row.samples}{gain}",
        f"{row.step_ms:.2f} ms",
        NOTHING if row.mfu is None else percent(row.mfu),
        NOTHING if row.busy is None else percent(row.busy),
        NOTHING if row.peak_bytes is None else size(row.peak_bytes),
        *(
            percent(row.memory[category] / total) if total and category in row.memory else NOTHING
            for category in CATEGORIES
        ),
    )


if __name__ == "__main__":
    main()
