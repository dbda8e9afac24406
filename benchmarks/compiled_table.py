"""Compiled and graphed steps on a GPU: what stepscope says of them against what was measured.

    PYTHONPATH=src python3 benchmarks/compiled_table.py --save rows.json [--seconds 400] \
        [--at-once 6] [--only gpt2,bert] [--ways eager,default] [--precisions bf16] [--tiny]
    python3 benchmarks/compiled_table.py --save rows.json --print
    python3 benchmarks/compiled_summary.py rows.json        as docs/records/efficiency.md has them

Each row is one training, run under `stepscope run`; several start and compile beside each other,
and each has the device alone from its first optimizer step to its last. It times each of its steps
itself, and a dozen before the profiler's window by the clock on the wall ("timed"). A host that
shares its machine changes its pace: the step that stepscope says is held against the training's own
times of the very steps it is the mean of, and so is MFU; of the step before the window the
training's time also has the profiler's start, 5 to 60 ms, and is left out. FLOPs are counted by
torch in an eager step, without what fused attention computes again in backward: an eager step may
run another one.

Memory has two truths. What torch reserves is held against the driver's count beyond the context.
The peak of a step without CUDA graphs is held against torch's own peak: the driver also counts what
the allocator keeps for later. With graphs it is held against the driver's count less that cache,
which lies outside the graphs' pools: nobody else can use what a pool keeps, used or not.

Findings about a step stand apart from those about the run, which is short here. Rows are saved one
by one: a run that is cut goes on where it ended, and failed rows are tried again. The most telling
rows come first. `--tiny` is for a machine without a GPU: eager and default in fp32 only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).parent))

from library_turn import end_with_children, side_by_side

MODELS = ("gpt2", "resnet50", "llama", "unet", "bert")
WAYS = (
    "reduce-overhead",
    "whole-step graph",
    "default",
    "graphed callables",
    "eager",
    "max-autotune-no-cudagraphs",
)
GRAPHED = ("reduce-overhead", "whole-step graph", "graphed callables")
IN_ALL_PRECISIONS = ("reduce-overhead", "default", "eager")
PRECISIONS = ("bf16", "tf32", "fp32")
CLOSE = 0.03  # of memory
_ROW_S = 420  # most of it may be waiting for others
_LEAST_S = 25  # less is not enough for any row
_ERROR_END = 1500  # characters

Row = dict[str, Any]
Case = tuple[str, str, str]  # model, way, precision


def main() -> int:
    options = _options()
    if options.worker:
        from compiled_training import train

        train(*options.case.split("/"), options.worker, tiny=options.tiny)
        return 0
    if options.explain:
        print(json.dumps(explained(options.explain, json.loads(sys.stdin.read()))))
        return 0
    rows = json.loads(options.save.read_text()) if options.save.exists() else []
    if not options.print:
        rows = Rows(options.save, [row for row in rows if "error" not in row]).measure(options)
    print(markdown(rows))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=400, help="for all rows")
    parser.add_argument("--row-seconds", type=float, default=_ROW_S, help="then a row is ended")
    parser.add_argument("--at-once", type=int, default=6, help="rows beside each other")
    parser.add_argument("--only", default=",".join(MODELS), help="models, by comma")
    parser.add_argument("--ways", help="by comma; all: " + ", ".join(WAYS))
    parser.add_argument("--precisions", help="by comma; all: " + ", ".join(PRECISIONS))
    parser.add_argument("--save", type=Path, help="JSON; read first, written after every row")
    parser.add_argument("--keep", type=Path, help="a folder for the run folders of all rows")
    parser.add_argument("--print", action="store_true", help="measure nothing")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
    for name in ("--worker", "--explain"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (options.save or options.worker or options.explain):
        parser.error("--save FILE is needed: rows are kept there")
    return options


def plan(options: argparse.Namespace) -> list[Case]:
    """All ways in bf16 first, what takes minutes to compile last; the other precisions in three
    ways unless ways are named."""
    tiny_ways = ("eager", "default")
    ways = options.ways.split(",") if options.ways else tiny_ways if options.tiny else WAYS
    precisions = options.precisions.split(",") if options.precisions else PRECISIONS
    if options.tiny and not options.precisions:  # most CPUs take seconds for a product in bf16
        precisions = ("fp32",)
    order = [
        (way, precision)
        for precision, way in product(precisions, ways)
        if options.ways or precision == precisions[0] or way in IN_ALL_PRECISIONS
    ]
    order.sort(key=lambda item: item[0].startswith("max-autotune"))
    return [(model, *item) for item in order for model in options.only.split(",")]


class Rows:
    """The rows of a file; several threads measure, and each row is saved at once."""

    def __init__(self, file: Path, rows: list[Row]) -> None:
        self._file, self._rows = file, rows
        self._lock = threading.Lock()
        file.parent.mkdir(parents=True, exist_ok=True)

    def measure(self, options: argparse.Namespace) -> list[Row]:
        end = time.monotonic() + options.seconds
        known = {(row["model"], row["way"], row["precision"]) for row in self._rows}
        cases = [case for case in plan(options) if case not in known]
        with side_by_side(options.at_once) as pool:
            list(pool.map(lambda case: self._measure_one(case, end, options), cases))
        return self._rows

    def _measure_one(self, case: Case, end: float, options: argparse.Namespace) -> None:
        began = time.monotonic()
        if end - began < _LEAST_S:
            return
        row: Row = dict(zip(("model", "way", "precision"), case, strict=True))
        try:
            row |= run_row(case, min(options.row_seconds, end - began), options)
        except Exception as error:  # one row's trouble is not the next one's
            row["error"] = f"{type(error).__name__}: {error}"
        row["took_s"] = round(time.monotonic() - began, 1)
        self._add(row)

    def _add(self, row: Row) -> None:
        with self._lock:
            self._rows.append(row)
            print(json.dumps(row), flush=True)
            written = self._file.with_suffix(".part")
            written.write_text(json.dumps(self._rows, indent=1))
            written.replace(self._file)


def run_row(case: Case, limit_s: float, options: argparse.Namespace) -> Row:
    """What the training measured and what stepscope says of it; RuntimeError if either fails."""
    from compiled_training import ACTIVE, WAIT, WARMUP

    end = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder:
        out, facts = Path(folder, "run"), Path(folder, "facts.json")
        window = ["--wait", WAIT, "--warmup", WARMUP, "--active", ACTIVE, "--repeat", 1]
        capture = ["-m", "stepscope", "run", "--no-explain", "--out", out, *window, "--"]
        training = [sys.executable, __file__, "--worker", facts, "--case", "/".join(case)]
        _run_to_end([*capture, *training, *(["--tiny"] if options.tiny else [])], limit_s)
        if options.keep is not None:
            shutil.copytree(out, options.keep / "-".join(case).replace(" ", "_"))
        measured = json.loads(facts.read_text())
        about = json.dumps(measured | {"way": case[1]})
        answer = _run_to_end([__file__, "--explain", out], end - time.monotonic(), about)
        row: Row = measured | json.loads(answer)
        return row


def _run_to_end(arguments: list[Any], limit_s: float, given: str = "") -> str:
    """A Python program's output; after the time limit all that it started is ended too."""
    paths = [str(Path(__file__).parent.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    child = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,  # a child whose parent died is still found
    )
    try:
        output, errors = child.communicate(given, max(1.0, limit_s))
    except subprocess.TimeoutExpired:
        end_with_children(child.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        _, errors = child.communicate()
        raise RuntimeError(f"ended after {limit_s:.0f} s: {shortened(errors)}") from None
    if child.returncode:
        raise RuntimeError(f"exit code {child.returncode}: {shortened(errors)}")
    return output


def shortened(errors: str) -> str:
    """The first line that names an error, and the end: what follows the error may be long."""
    named = next((line.strip() for line in errors.splitlines() if "Error" in line), None)
    end = errors[-_ERROR_END:]
    return end if named is None or named in end else f"{named} [...] {end}"


def explained(out: Path, measured: Row) -> Row:
    """What `stepscope explain` says of the run folder, over what the training measured."""
    from stepscope.explain.explain_job import explain_job

    rank = explain_job(out, cache=False).ranks[0]
    efficiency, memory, compiled = rank.efficiency, rank.memory, rank.compiled
    parts = sum(part.ms for part in rank.budget.parts) if rank.budget.step_ms else None
    timeline = rank.timeline
    pieces = timeline.compute_ns + timeline.exposed_comm_ns + timeline.exposed_memory_ns
    same_ms = same_steps_ms(out, measured)
    rate = ratio(measured["model_flops"], same_ms / 1e3)
    return {
        "mfu": efficiency.mfu if efficiency else None,
        "expected_mfu": ratio(rate, efficiency.peak_flops if efficiency else None),
        "flops_ratio": ratio(
            efficiency.model_flops if efficiency else None, measured["model_flops"]
        ),
        "same_ms": same_ms,
        "step_ratio": ratio(rank.step_ms.truth or rank.step_ms.corrected, same_ms),
        **_memory_ratios(memory, measured),
        "parts_ratio": ratio(parts, rank.budget.step_ms),
        "timeline_left_ns": timeline.span_ns - pieces - timeline.idle_ns,
        "operator_share": compiled.operator_share if compiled else None,
        "line_share": compiled.line_share if compiled else None,
        "findings": [_words(one) for one in rank.findings if one.of != "run"],
        "run_findings": [_words(one) for one in rank.findings if one.of == "run"],
        "quality": [note.id for note in rank.quality],
    }


def same_steps_ms(out: Path, measured: Row) -> float:
    """The training's own times of the steps that stepscope takes the mean of, which are its steady
    ones; the last steps of both are the same. Not of the one before the window: the profiler starts
    between the two, and the training's clock runs on. Without times of each step: those timed."""
    from stepscope.explain.whole_run.stalls import find_steady
    from stepscope.trace.decode import Oddities
    from stepscope.trace.run_folder.step_files import read_step_columns

    own_ms: list[float] = measured.get("steps_ms", [])
    columns = (
        read_step_columns(next(out.glob("rank-*")), Oddities("steps.jsonl")) if own_ms else None
    )
    if columns is None:
        return float(measured["bare_ms"])
    steady, _ = find_steady(columns)
    steady[:-1] &= ~columns.window[1:]
    places = columns.number[steady] - columns.number[-1] + len(own_ms) - 1
    same = [own_ms[place] for place in places.tolist() if place >= 0]
    return sum(same) / len(same) if same else float(measured["bare_ms"])


def _memory_ratios(memory: Any, measured: Row) -> Row:
    if memory is None:
        return {}
    graphed = measured["way"] in GRAPHED and measured["driver_bytes"] is not None
    cached = measured.get("cached_bytes")
    truth, words = measured["allocated_bytes"], "torch"
    if graphed:
        truth = measured["driver_bytes"] - (cached or 0)
        words = "driver" if cached is None else "driver less cache"
    held = sum(size or 0 for size in memory.categories.values())
    return {
        "peak_bytes": memory.peak_bytes,
        "peak_truth": words,
        "peak_ratio": ratio(memory.peak_bytes, truth),
        "reserved_ratio": ratio(memory.reserved_bytes, measured["driver_bytes"]),
        "categories_ratio": ratio(held, memory.peak_bytes),
    }


def _words(finding: Any) -> str:
    return f"{finding.id} {finding.share:.0%} ({finding.severity})"


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


_COLUMNS = (
    ("MFU / expected", lambda row: ratio(row.get("mfu"), row.get("expected_mfu"))),
    ("FLOPs / eager's", lambda row: row.get("flops_ratio")),
    ("step / own", lambda row: row.get("step_ratio")),
    ("own / timed", lambda row: ratio(row.get("same_ms"), row.get("bare_ms"))),
    ("peak / truth", lambda row: row.get("peak_ratio")),
    ("reserved / driver's", lambda row: row.get("reserved_ratio")),
    ("parts / step", lambda row: row.get("parts_ratio")),
    ("with operator", lambda row: row.get("operator_share")),
    ("with line", lambda row: row.get("line_share")),
)


def markdown(rows: list[Row]) -> str:
    """A short table, and the findings of each row below it."""
    names = [name for name, _ in _COLUMNS]
    lines = [f"| training | ms | {' | '.join(names)} | memory |", "|---" * (len(names) + 3) + "|"]
    notes = []
    for row in rows:
        title = f"{row['model']} {row['way']} {row['precision']}"
        if "error" in row:
            notes.append(f"{title}: failed: {row['error'][:240]}")
            continue
        values = [value(row) for _, value in _COLUMNS]
        cells = ["-" if value is None else f"{value:.3f}" for value in values]
        cells.append(memory_verdict(row))
        lines.append(f"| {title} | {row['bare_ms']:.2f} | {' | '.join(cells)} |")
        about_run = ", ".join(row.get("run_findings", ()))
        words = [", ".join(row["findings"]) or "no finding"]
        words += [f"of the run: {about_run}"] if about_run else []
        notes.append(f"{title}: {'; '.join(words)}")
    return "\n".join([*lines, "", *notes])


def memory_verdict(row: Row) -> str:
    """Whether both ratios are within 3%, and what the peak was held against."""
    found = [row.get("peak_ratio"), row.get("reserved_ratio")]
    known = [abs(one - 1) for one in found if one is not None]
    if len(known) < len(found):
        return "not known"
    verdict = "within" if max(known) <= CLOSE else "NOT within"
    return f"{verdict} {CLOSE:.0%} (peak: {row['peak_truth']}; {row['counted_by']})"


if __name__ == "__main__":
    sys.exit(main())
