"""What-ifs of every workload, promised before anybody measured them, and then measured.

    python benchmarks/bench_promises.py [NAMES] [--size small] [--at-once 4] [--out DIR]

A workload is captured in fp32. From that run alone its step is predicted in tf32, in bf16, with a
fused optimizer and with twice the batch, and the promises are written down. Then each change is
made for real, as `stepscope bench --with` makes it, and trains in turns with the plain workload.
Peaks of memory are the allocator's; FLOPs are also counted by torch's own counter.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))

from each_workload import Result, options_for, read, run_each, save
from library_table import print_table
from library_turn import Turns

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from forked_training import ForkedTraining, Window

WAIT, AFTER = 14, 6  # captured steps before the window, and after it
ROUNDS = 4
CLEAR = 0.05  # a measured change above this must have the promised sign


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


def main() -> None:
    options = options_for(__doc__, "bench_promises").parse_args()
    if run_each(options, _one_workload):
        print_results(read(options.out))


# One workload


def _one_workload(name: str, options: argparse.Namespace) -> None:
    from forked_training import Way, Window, forked

    began = time.perf_counter()
    turns = Turns(options.turns)
    turns.enter()
    folder = options.out / "runs" / f"{name}-{time.time_ns()}"
    changed = [Way(remedies=one.remedies, batches=one.batches) for one in CHANGES.values()]
    ways = [Way(), Way(), Way(), Way(), *changed]
    with forked(name, options.size, options.device, ways) as (
        fake,
        captured,
        counted,
        base,
        *others,
    ):
        promised_peak = _predict_peak(fake)
        counted.build()
        per_step = counted.facts().captured_per_step
        window = Window(folder=folder, wait=WAIT, per_step=per_step)
        result = _capture(captured, window, turns)
        result |= {"size": options.size, "promised_peak_bytes": promised_peak}
        save(options.out, name, result)  # the promises, before anything is measured
        result["flops"]["torch"] = _count(counted, window)
        save(options.out, name, result)
        _measure(base, dict(zip(CHANGES, others, strict=True)), result, turns)
    result |= {"finished": not _short_of_memory(result), "seconds": time.perf_counter() - began}
    save(options.out, name, result)


def _short_of_memory(result: Result) -> bool:
    """It may do with fewer workloads at once: give the command again."""
    return any("OutOfMemory" in (row.get("failure") or "") for row in result["changes"].values())


def _predict_peak(training: ForkedTraining) -> int | None:
    """As known before the first run."""
    from forked_training import TrainingFailedError

    try:
        return training.predicted_peak_bytes()
    except TrainingFailedError as problem:
        print(f"peak before the run: {problem}", flush=True)
        return None
    finally:
        training.close()


def _capture(training: ForkedTraining, window: Window, turns: Turns) -> Result:
    from forked_training import FIRST
    from stepscope.predict.whatifs import parse_setting
    from stepscope.ui.cli.whatif import open_bench

    training.build(window)
    with turns.alone():
        training.train(window.traced.stop + AFTER - FIRST)
    facts = training.facts()
    training.close()
    bench, rank, _ = open_bench(str(window.folder), cache=False, quiet=True)
    promises = {}
    for label, change in CHANGES.items():
        promise = bench.predict([parse_setting(change.whatif)])
        promises[label] = {
            "promised_ms": None if promise.refused else window.per_step * promise.predicted_ms,
            "low_ms": window.per_step * promise.low_ms,
            "high_ms": window.per_step * promise.high_ms,
            "promised_peak_bytes": promise.peak_bytes,
            "refused": "; ".join(promise.refused) or None,
        }
    efficiency, memory = rank.efficiency, rank.memory
    return {
        "device": facts.device,
        "batch": facts.batch,
        "flops": {
            "explained": window.per_step * efficiency.model_flops if efficiency else None,
            "torch": None,
        },
        "captured_ms": window.per_step * bench.mean_ns / 1e6,
        "explained_peak_bytes": memory.peak_bytes if memory else None,
        "changes": promises,
        "finished": False,
    }


def _count(training: ForkedTraining, window: Window) -> float | None:
    """Torch's count of the steps that were traced, or None where its counter fails."""
    from forked_training import FIRST, TrainingFailedError

    try:
        training.train(window.traced.start - FIRST)
        counts = training.flops(list(window.traced))
    except TrainingFailedError as problem:
        print(f"torch's FLOP counter: {problem}", flush=True)
        return None
    finally:
        training.close()
    return fmean(counts)


def _measure(
    base: ForkedTraining, others: dict[str, ForkedTraining], result: Result, turns: Turns
) -> None:
    """Only what was promised."""
    from forked_training import TrainingFailedError, measure_in_turns, middle

    base.build()
    built = {}
    for label, training in others.items():
        row = result["changes"][label]
        if row["refused"]:
            continue
        try:
            training.build()
            row["failure"] = training.facts().not_applied
        except TrainingFailedError as problem:
            row["failure"] = str(problem)
        if not row["failure"]:
            built[label] = training
    blocks = measure_in_turns([base, *built.values()], turns, ROUNDS)
    result["base"] = {
        "ms": middle(blocks[0]),
        "blocks_ms": blocks[0],
        "peak_bytes": base.peak_bytes(),
    }
    for (label, training), its_blocks in zip(built.items(), blocks[1:], strict=True):
        result["changes"][label] |= {
            "ms": middle(its_blocks),
            "blocks_ms": its_blocks,
            "peak_bytes": training.peak_bytes(),
        }


# All of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One promise and what came of it."""

    name: str
    label: str
    base_ms: float  # measured beside the change
    captured_ms: float  # what the promise starts from
    promised_ms: float
    low_ms: float
    high_ms: float
    ms: float
    promised_peak_bytes: int | None
    peak_bytes: int | None

    @property
    def error(self) -> float:
        return self.promised_ms / self.ms - 1

    @property
    def change(self) -> float:
        return self.ms / self.base_ms - 1

    @property
    def promised_change(self) -> float:
        return self.promised_ms / self.captured_ms - 1

    @property
    def is_inside(self) -> bool:
        return self.low_ms <= self.ms <= self.high_ms

    @property
    def has_wrong_sign(self) -> bool:
        return abs(self.change) > CLEAR and (self.change > 0) != (self.promised_change > 0)

    @property
    def peak_error(self) -> float | None:
        if not self.peak_bytes or self.promised_peak_bytes is None:
            return None
        return self.promised_peak_bytes / self.peak_bytes - 1


def outcomes(results: dict[str, Result]) -> Iterator[Outcome]:
    """Of every promise that was measured."""
    for name, result in results.items():
        for label, row in result.get("changes", {}).items():
            if row.get("ms") is not None:
                yield Outcome(
                    name=name,
                    label=label,
                    base_ms=result["base"]["ms"],
                    captured_ms=result["captured_ms"],
                    promised_ms=row["promised_ms"],
                    low_ms=row["low_ms"],
                    high_ms=row["high_ms"],
                    ms=row["ms"],
                    promised_peak_bytes=row["promised_peak_bytes"],
                    peak_bytes=row["peak_bytes"],
                )


def print_results(results: dict[str, Result]) -> None:
    """Markdown."""
    measured = list(outcomes(results))
    print_table(
        ("workload", "change", "base ms", "promised", "measured", "error", "peak error", ""),
        [_row(one) for one in measured],
    )
    print()
    for sentence in summary(measured):
        print(f"- {sentence}")
    for sentence in _facts(results):
        print(f"- {sentence}")
    for name, result in results.items():
        for label, row in result.get("changes", {}).items():
            if why := row.get("refused") or row.get("failure"):
                print(f"- {name}, {label}: not measured: {why}")


def _row(one: Outcome) -> tuple[str, ...]:
    notes = [] if one.is_inside else ["outside its interval"]
    notes += ["**wrong sign**"] if one.has_wrong_sign else []
    return (
        one.name,
        one.label,
        f"{one.base_ms:.2f}",
        f"{one.promised_ms:.2f} ({one.low_ms:.2f} to {one.high_ms:.2f})",
        f"{one.ms:.2f}",
        f"{one.error:+.1%}",
        "-" if one.peak_error is None else f"{one.peak_error:+.1%}",
        ", ".join(notes),
    )


def summary(measured: Sequence[Outcome]) -> Iterator[str]:
    """The means in sentences, all together and by change."""
    if not measured:
        yield "nothing was measured"
        return
    for label in ("", *CHANGES):
        chosen = [one for one in measured if label in ("", one.label)]
        if not chosen:
            continue
        errors = [abs(one.error) for one in chosen]
        inside = sum(one.is_inside for one in chosen)
        same = fmean(abs(one.base_ms / one.ms - 1) for one in chosen)
        yield (
            f"{label or 'all'}: mean error {fmean(errors):.1%}, worst {max(errors):.1%} "
            f"({len(chosen)} promises, {inside} inside their intervals; {same:.1%} if nothing had "
            "been promised to change)"
        )
    wrong = [f"{one.name} {one.label}" for one in measured if one.has_wrong_sign]
    clear = sum(abs(one.change) > CLEAR for one in measured)
    yield (
        f"sign wrong in {len(wrong)} of {clear} changes above {CLEAR:.0%}"
        f"{': ' + ', '.join(wrong) if wrong else ''}"
    )
    if peaks := [abs(one.peak_error) for one in measured if one.peak_error is not None]:
        yield f"promised peaks of memory: mean error {fmean(peaks):.1%}, worst {max(peaks):.1%}"


def _facts(results: dict[str, Result]) -> Iterator[str]:
    """FLOPs against torch's counter, and explained peaks against the allocator's."""
    yield from _worst("FLOPs against torch's counter", _flops_errors(results), within=0.01)
    for key, when in (("promised_peak_bytes", "before the run"), ("explained_peak_bytes", "after")):
        what = f"peaks of memory known {when} against the allocator's"
        yield from _worst(what, _peak_errors(results, key), within=0.03)


def _flops_errors(results: dict[str, Result]) -> Iterator[tuple[str, float]]:
    for name, result in results.items():
        flops: dict[str, Any] = result.get("flops", {})
        if flops.get("torch") and flops.get("explained") is not None:
            yield name, flops["explained"] / flops["torch"] - 1


def _peak_errors(results: dict[str, Result], key: str) -> Iterator[tuple[str, float]]:
    for name, result in results.items():
        allocated = result.get("base", {}).get("peak_bytes")
        if allocated and result.get(key) is not None:
            yield name, result[key] / allocated - 1


def _worst(what: str, errors: Iterable[tuple[str, float]], within: float) -> Iterator[str]:
    known = list(errors)
    if known:
        name, worst = max(known, key=lambda one: abs(one[1]))
        near = sum(abs(error) <= within for _, error in known)
        yield f"{what}: {near} of {len(known)} within {within:.0%}, worst {name} ({worst:+.1%})"


if __name__ == "__main__":
    main()
