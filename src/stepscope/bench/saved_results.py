"""Saved results: the file that --save writes, the folder of a bench, or one workload's run."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from stepscope.bench.catalogue import load
from stepscope.bench.request import options_parser
from stepscope.bench.results import BenchResults, WorkloadResult
from stepscope.bench.steps import captured_per_step, whole_steps
from stepscope.bench.workload import TrainingWorkload
from stepscope.errors import NotCapturedError, UnreadableInputError
from stepscope.records.quality import encode_json
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.files import is_folder, may_exist, read_whole
from stepscope.verify.runs import ComparedRun, find_runs
from stepscope.verify.steady import steady_steps

SCHEMA = 1
RESULTS = "bench.json"  # in the folder of a bench
_MOST_BYTES = 256 << 20
_MODULE = "stepscope.bench.train"


def read_results(path: Path) -> BenchResults:
    """UnreadableInputError or NotCapturedError if there are none."""
    if is_folder(path):
        return _of_file(path / RESULTS) if may_exist(path / RESULTS) else _of_run(path)
    return _of_file(path)


def write_results(results: BenchResults, path: Path) -> None:
    """All of it or nothing; OSError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(encode_json(results))
    temporary.replace(path)


def _of_file(file: Path) -> BenchResults:
    try:
        results = decode(read_whole(file, _MOST_BYTES), BenchResults)
    except NotJsonError as error:
        raise UnreadableInputError(
            f"{file} was not written by stepscope bench --save: {error}"
        ) from None
    if results.schema != SCHEMA:
        raise UnreadableInputError(
            f"{file} has schema {results.schema}, but this stepscope reads {SCHEMA}. Save it again"
        )
    if any(_takes_no_time(row) for row in results.workloads):
        raise UnreadableInputError(f"{file} has a run that takes no time. Save it again")
    return results


def _takes_no_time(row: WorkloadResult) -> bool:
    steps_ms = (sum(steps) for steps in row.steps_ms)
    return any(ms <= 0 for ms in (*row.runs_ms, *row.calibration_ms, *row.paced, *steps_ms))


def _of_run(folder: Path) -> BenchResults:
    """One run: `stepscope run -- python -m stepscope.bench.train NAME`."""
    runs = find_runs(str(folder))
    command = runs[-1].facts.get("command") or ()
    rows = _together(_row(run) for run in runs)
    return BenchResults(stepscope="", command=tuple(command), started_unix=0.0, workloads=rows)


def _together(rows: Iterable[WorkloadResult]) -> tuple[WorkloadResult, ...]:
    """Runs of one workload, size, settings and remedies become one row."""
    found: dict[bytes, WorkloadResult] = {}
    for row in rows:
        like = encode_json(replace(row, runs_ms=(), steps_ms=(), folder=None))
        if known := found.get(like):
            runs_ms, steps_ms = known.runs_ms + row.runs_ms, known.steps_ms + row.steps_ms
            row = replace(known, runs_ms=runs_ms, steps_ms=steps_ms)
        found[like] = row
    return tuple(found.values())


def _row(run: ComparedRun) -> WorkloadResult:
    options = _options(run.facts.get("command") or ())
    if options is None:
        raise NotCapturedError(
            f"{run.path} is not a run of a workload: its command does not start {_MODULE}"
        )
    workload = load(options.name)
    trained = options.steps or workload.targets[options.size].steps
    per_step = captured_per_step(run.facts.get("steps") or 0, trained)
    steps = whole_steps(steady_steps(run.step_ms), per_step)
    if not len(steps):
        raise NotCapturedError(f"{run.path} has no steady step outside the profiled window")
    return WorkloadResult(
        name=options.name,
        size=options.size,
        ranks=run.facts.get("world_size") or 1,
        settings=_settings(workload, options),
        remedies=tuple(remedy.id for remedy in run.facts.get("remedies", ())),
        runs_ms=(float(steps.mean()),),
        steps_ms=(tuple(steps.tolist()),),
        folder=run.path,
    )


def _settings(workload: TrainingWorkload, options: argparse.Namespace) -> dict[str, Any]:
    changes = dict(change.split("=", 1) for change in options.set if "=" in change)
    try:
        return dict(workload.config(options.size, changes))
    except KeyError as error:
        raise NotCapturedError(f"{workload.name} no longer has the setting {error}") from None


def _options(command: Sequence[str]) -> argparse.Namespace | None:
    """None if the command trains something else."""
    if _MODULE not in command:
        return None
    words = command[list(command).index(_MODULE) + 1 :]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return options_parser().parse_known_args(words)[0]
    except SystemExit:  # argparse's way to refuse
        return None
