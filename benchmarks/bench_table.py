"""The suite in five ways of training, in one table, and what was once observed of such workloads.

    python benchmarks/bench_table.py [NAMES] [--size small] [--at-once 6] [--out DIR]
        [--promises DIR] > TABLE.md                 the tables of docs/records/bench.md

Each workload trains in fp32 as it is, with tf32, with bf16, with bf16 and a fused optimizer, and
with those two compiled. Each is captured and explained as `stepscope bench` does it. --promises is
the --out of bench_promises.py: its steps with twice the batch show where throughput saturates.
Ways that --out holds are not trained again: a long table can be made in several commands.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

import msgspec

from bench_observations import print_observations
from device_room import Room, needed
from each_workload import (
    Result,
    Stopwatch,
    options_for,
    read,
    run_each,
    run_folder,
    save,
    spent_on,
    waits,
)
from library_table import NOTHING, print_table
from library_turn import Turns
from stepscope.bench.catalogue import load
from stepscope.bench.results import WorkloadResult
from stepscope.text.figures import percent, significant, size

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
AT_ONCE = 4  # ways that are built beside each other: compiling would keep the host of others busy
WARM_UP, AFTER = 3, 4  # steps before the captured ones and, captured, after the window
UNKNOWN_BYTES = 12 << 30  # of a training whose peak is not known yet
CATEGORIES = ("activations", "parameters", "gradients", "optimizer", "temporaries")


def main() -> None:
    parser = options_for(__doc__, "bench_table")
    parser.add_argument("--promises", type=Path, help="what bench_promises.py has written")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    options = parser.parse_args()
    if unknown := set(options.ways.split(",")) - set(WAYS):
        parser.error(f"--ways: there is no {', '.join(sorted(unknown))}")
    if run_each(options, _one_workload):
        results = read(options.out)
        for sentence in spent_on(results):
            print(sentence, file=sys.stderr)
        rows = read_rows(results)
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
    spend, turns = Stopwatch(), Turns(options.turns)
    turns.enter()  # before the imports: they would slow the host of a workload being timed
    from forked_training import Way, Window, forked, plain_steps
    from stepscope.bench.task import BenchTask

    result: Result = {"ways": {}} | ({} if options.again else read(options.out).get(name, {}))
    result["finished"] = False
    labels = missing_ways(options.ways.split(","), result["ways"])
    if not labels:
        return
    ways = [Way(), *(Way(remedies=WAYS[label]) for label in labels)]
    with (
        run_folder(name, options) as home,
        forked(name, options.size, options.device, ways) as (plain, *trainings),
    ):
        room = Room(options.turns / "room", plain.device_bytes())
        with room.held(needed([UNKNOWN_BYTES])), spend("looking at one step"):
            plain.build()
            wait = plain_steps(plain.train(3) / 3)
            facts, peak_bytes = plain.facts(), plain.peak_bytes()
            plain.close()
        result["device"] = facts.device
        rows = [
            WayOfTask(
                label=label,
                task=BenchTask(workload=load(name), size=options.size, remedies=WAYS[label]),
                training=training,
                window=Window(
                    folder=home / label, wait=wait, active=2, per_step=facts.captured_per_step
                ),
            )
            for label, training in zip(labels, trainings, strict=True)
        ]
        for first in range(0, len(rows), AT_ONCE):
            some = rows[first : first + AT_ONCE]
            with room.held(needed([peak_bytes or 0] * len(some))):
                with spend("building"), ThreadPoolExecutor(len(some)) as pool:
                    failures = list(pool.map(_build, some))
                with spend("capturing"):
                    for place, row in enumerate(some):
                        failures[place] = _train(row, turns, failures[place])
            for row, failure in zip(some, failures, strict=True):
                with spend("explaining"):
                    measured = _explain(row, failure)
                result["ways"][row.label] = msgspec.to_builtins(measured)
                save(options.out, name, result)
    result["finished"] = not missing_ways(list(WAYS), result["ways"])
    result["spent_s"] = spend.spent_s | waits(turns, room)
    save(options.out, name, result)


def _build(row: WayOfTask) -> str | None:
    """Why it cannot train in this way."""
    from forked_training import TrainingFailedError

    try:
        row.training.build()
        return row.training.facts().not_applied
    except TrainingFailedError as problem:
        return str(problem)


def _train(row: WayOfTask, turns: Turns, failure: str | None) -> str | None:
    """Captured, with the device to itself; why it could not be."""
    from forked_training import TrainingFailedError

    try:
        if not failure:
            with turns.alone():
                row.training.train(WARM_UP)
                row.training.capture(row.window)
                row.training.train(row.window.steps + AFTER)
    except TrainingFailedError as problem:
        failure = str(problem)
    finally:
        row.training.close()
    return failure


def _explain(row: WayOfTask, failure: str | None) -> WorkloadResult:
    from stepscope.errors import StepscopeError
    from stepscope.ui.bench.results import BenchRun, explain_run, whole_steps, workload_result
    from stepscope.verify.runs import find_runs
    from stepscope.verify.steady import steady_steps

    folder, per_step = row.window.folder, row.window.per_step
    try:
        if not failure:
            steady = steady_steps(find_runs(str(folder))[0].step_ms)
            run = BenchRun(
                number=1,
                folder=folder,
                seconds=float(sum(steady)) / 1e3,
                steps_ms=whole_steps(steady, per_step),
                captured_per_step=per_step,
            )
            return workload_result(row.task, [run], explain_run(run))
    except StepscopeError as problem:
        failure = str(problem)
    failed = BenchRun(number=1, folder=folder, seconds=0.0, failed=failure)
    return workload_result(row.task, [failed], None)


def missing_ways(wanted: Sequence[str], known: dict[str, Result]) -> list[str]:
    """Those that were not tried, or had too little memory while others trained beside them."""
    return [
        label
        for label in wanted
        if label not in known or "out of memory" in (known[label].get("why") or "")
    ]


# All of them


def read_rows(results: dict[str, Result]) -> dict[str, dict[str, WorkloadResult]]:
    """By workload and way."""
    return {
        name: {
            label: msgspec.convert(result["ways"][label], WorkloadResult)
            for label in WAYS
            if label in result.get("ways", {})
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
