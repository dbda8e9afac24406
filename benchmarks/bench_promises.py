"""What-ifs of every workload, promised before anybody measured them, and then measured.

    python benchmarks/bench_promises.py [NAMES] [--size small] [--at-once 4] [--out DIR]
        [--probe-budget 6s]

A workload is captured in fp32. From that run alone its step is predicted in tf32, in bf16, with a
fused optimizer and with twice the batch, once more with operator times that `stepscope probe`
measured, and the promises are written down. Then each change is made for real, as
`stepscope bench --with` makes it, and trains in turns with the plain workload. Peaks of memory are
the allocator's; FLOPs are also counted by torch's own counter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

sys.path.insert(0, str(Path(__file__).parent))

import msgspec

from device_room import Room, needed
from each_workload import (
    RUNS,
    Result,
    Stopwatch,
    options_for,
    read,
    run_each,
    run_folder,
    save,
    waits,
)
from library_turn import Turns
from promise_outcomes import print_results

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from forked_training import ForkedTraining, Window
    from stepscope.records.memory import Memory
    from stepscope.records.prediction import Prediction

T = TypeVar("T")
WARM_UP, AFTER = 3, 12  # steps before the captured ones and, captured, after the window
ROUNDS = 3
AT_ONCE = 2  # changes that are built at the same time, beside the base
PREDICTING_BYTES = 8 << 30  # for the prediction of a peak, which runs single operators
UNKNOWN_BYTES = 12 << 30  # of a training whose peak could not be predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A what-if, and how the change is made for real."""

    whatif: str
    remedies: tuple[str, ...] = ()
    batches: int = 1


CHANGES = {
    "tf32": Change(whatif="precision=tf32", remedies=("tf32",)),
    "bf16": Change(whatif="precision=bf16", remedies=("bf16",)),
    "fused": Change(whatif="optimizer=fused", remedies=("fused-optimizer",)),
    "batch x2": Change(whatif="batch=x2", batches=2),
}


PROBED = ("tf32", "bf16", "batch x2")


def main() -> None:
    parser = options_for(__doc__, "bench_promises")
    parser.add_argument("--probe-budget", default="6s", help="0s: no promises with probed times")
    options = parser.parse_args()
    if run_each(options, _one_workload):
        print_results(read(options.out))


# One workload


def _one_workload(name: str, options: argparse.Namespace) -> None:
    spend, turns = Stopwatch(), Turns(options.turns)
    turns.enter()  # before the imports: they would slow the host of a workload being timed
    from forked_training import Way, forked

    changed = [Way(remedies=one.remedies, batches=one.batches) for one in CHANGES.values()]
    ways = [Way(), Way(), Way(), Way(), *changed]
    with (
        run_folder(name, options) as folder,
        forked(name, options.size, options.device, ways) as (
            fake,
            captured,
            counted,
            base,
            *others,
        ),
    ):
        os.environ["STEPSCOPE_LIBRARY"] = str(options.out / RUNS / f"{folder.name}-library")
        room = Room(options.turns / "room", fake.device_bytes())
        with room.held(PREDICTING_BYTES), spend("predicting the peak"):
            before = _predict_peak(fake)
        peak = before["promised_peak_bytes"] or UNKNOWN_BYTES
        with room.held(needed([peak])):
            with spend("building and capturing"):
                result, window, traced = _capture(captured, folder, turns)
            result |= before | {"size": options.size}
            with (
                spend("explaining and counting"),
                ThreadPoolExecutor(1) as pool,
            ):  # torch counts while we explain
                counts = pool.submit(_count, counted, traced)
                _promise(result, window)
                save(options.out, name, result)  # the promises, before anything is measured
                result["flops"]["torch"] = counts.result()
        save(options.out, name, result)
        if options.probe_budget != "0s":
            with room.held(PREDICTING_BYTES), spend("probing"):
                _probe(window, options.probe_budget, turns)
                _promise_probed(result, window)
            save(options.out, name, result)
        peak = result["explained_peak_bytes"] or peak
        promised = {
            label: training
            for (label, row), training in zip(result["changes"].items(), others, strict=True)
            if not row["refused"]
        }
        with room.held(_most_needed(promised, result, peak)), spend("building and measuring"):
            _measure(base, promised, result, turns)
    spent_s = spend.spent_s | waits(turns, room)
    result |= {"finished": not _short_of_memory(result), "spent_s": spent_s}
    save(options.out, name, result)


def _short_of_memory(result: Result) -> bool:
    """It may do with fewer workloads at once: give the command again."""
    return any("out of memory" in (row.get("failure") or "") for row in result["changes"].values())


def _most_needed(labels: Iterable[str], result: Result, peak: int) -> int:
    """Bytes while the base trains in turns with some of the changes."""
    peaks = [result["changes"][label]["promised_peak_bytes"] or peak for label in labels]
    return max((needed([peak, *some]) for some in _some_at_a_time(peaks)), default=needed([peak]))


def _predict_peak(training: ForkedTraining) -> Result:
    """As known before the first run."""
    from forked_training import TrainingFailedError

    known: Result = {"promised_peak_bytes": None, "promised_peak_from": None}
    try:
        peak = training.predicted_peak()
        known |= {"promised_peak_bytes": peak.peak_bytes, "promised_peak_from": peak.method}
        known["promised_peak_notes"] = list(peak.notes)
    except TrainingFailedError as problem:
        known["promised_peak_notes"] = [str(problem)]
    finally:
        training.close()
    return known


def _capture(
    training: ForkedTraining, folder: Path, turns: Turns
) -> tuple[Result, Window, Sequence[int]]:
    """Train with the device to itself; also the numbers of the traced steps."""
    from forked_training import Window, plain_steps

    training.build()
    facts = training.facts()
    with turns.alone():
        wait = plain_steps(training.train(WARM_UP) / WARM_UP)
        window = Window(folder=folder, wait=wait, per_step=facts.captured_per_step)
        traced = training.capture(window)
        training.train(window.steps + AFTER)
    training.close()
    result = {"device": facts.device, "batch": facts.batch, "finished": False}
    return result, window, traced


def _promise(result: Result, window: Window) -> None:
    """From what was captured alone."""
    from stepscope.predict.whatifs import parse_setting
    from stepscope.ui.api import open_bench

    bench, rank, _ = open_bench(str(window.folder), cache=False, quiet=True)
    promises = {
        label: _promised(bench.predict([parse_setting(change.whatif)]), window)
        for label, change in CHANGES.items()
    }
    efficiency, memory = rank.efficiency, rank.memory
    result |= {
        "flops": {
            "explained": window.per_step * efficiency.model_flops if efficiency else None,
            "torch": None,
        },
        "captured_ms": window.per_step * bench.mean_ns / 1e6,
        "captured_stall_ms": window.per_step * bench.context.stalls_ns / 1e6,
        "explained_peak_bytes": memory.peak_bytes if memory else None,
        "explained_memory": _at_peak(memory) if memory else None,
        "changes": promises,
    }


def _promised(promise: Prediction, window: Window) -> Result:
    return {
        "promised_ms": None if promise.refused else window.per_step * promise.predicted_ms,
        "low_ms": window.per_step * promise.low_ms,
        "high_ms": window.per_step * promise.high_ms,
        "promised_peak_bytes": promise.peak_bytes,
        "low_peak_bytes": promise.peak_low_bytes,
        "high_peak_bytes": promise.peak_high_bytes,
        "refused": "; ".join(promise.refused) or None,
    }


def _probe(window: Window, budget: str, turns: Turns) -> None:
    """With the device to itself; without it there are no probed promises."""
    wanted = [word for name in PROBED for word in ("--set", CHANGES[name].whatif)]
    command = ["probe", str(window.folder), *wanted, "--budget", budget, "--json"]
    with turns.alone():
        done = subprocess.run(
            [sys.executable, "-m", "stepscope", *command],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        print(f"probe: {(done.stderr or done.stdout)[-300:]}", flush=True)


def _promise_probed(result: Result, window: Window) -> None:
    """Only the changes whose operators were probed; the others are promised as before."""
    from stepscope.predict.whatifs import parse_setting
    from stepscope.ui.api import open_bench

    bench, _, _ = open_bench(str(window.folder), cache=False, quiet=True)
    for label in PROBED:
        promise = bench.predict([parse_setting(CHANGES[label].whatif)])
        result["changes"][label]["probed"] = _promised(promise, window)


def _at_peak(memory: Memory) -> Result:
    """What held it, and every moment's line against the batch."""
    lines = memory.largest_batch.lines if memory.largest_batch else ()
    return {
        "phase": memory.phase,
        "categories": memory.categories,
        "lines": [msgspec.to_builtins(line) for line in lines],
    }


def _count(training: ForkedTraining, traced: Sequence[int]) -> float | None:
    """Torch's count of the steps that were traced, or None where its counter fails."""
    from forked_training import FIRST, TrainingFailedError

    try:
        training.build()
        training.train(traced[0] - FIRST)
        counts = training.flops(list(traced))
    except TrainingFailedError as problem:
        print(f"torch's FLOP counter: {problem}", flush=True)
        return None
    finally:
        training.close()
    return fmean(counts)


def _measure(
    base: ForkedTraining, promised: dict[str, ForkedTraining], result: Result, turns: Turns
) -> None:
    """Only what was promised, a few changes at a time, each beside the base."""
    from forked_training import measure_in_turns, middle

    base.build()
    base_blocks: list[float] = []
    for labels in _some_at_a_time(promised):
        some = {label: promised[label] for label in labels}
        with ThreadPoolExecutor(len(some)) as pool:
            failures = dict(zip(some, pool.map(_build, some.values()), strict=True))
        built = {label: some[label] for label in some if not failures[label]}
        blocks = measure_in_turns([base, *built.values()], turns, ROUNDS)
        base_blocks += blocks[0]
        for label in some:
            result["changes"][label]["failure"] = failures[label]
        for (label, training), its_blocks in zip(built.items(), blocks[1:], strict=True):
            result["changes"][label] |= {
                "ms": middle(its_blocks),
                "blocks_ms": its_blocks,
                "base_ms": middle(blocks[0]),  # of the same turns
                "peak_bytes": training.peak_bytes(),
            }
        for training in some.values():
            training.close()
    if not promised:
        base_blocks = measure_in_turns([base], turns, ROUNDS)[0]
    result["base"] = {
        "ms": middle(base_blocks),
        "blocks_ms": base_blocks,
        "peak_bytes": base.peak_bytes(),
    }


def _build(training: ForkedTraining) -> str | None:
    """Why it cannot train in this way."""
    from forked_training import TrainingFailedError

    try:
        training.build()
        return training.facts().not_applied
    except TrainingFailedError as problem:
        return str(problem)


def _some_at_a_time(labels: Iterable[T]) -> Iterator[list[T]]:
    left = list(labels)
    for first in range(0, len(left), AT_ONCE):
        yield left[first : first + AT_ONCE]


if __name__ == "__main__":
    main()
