"""Saved results: the file that --save writes, the folder of a bench, or one workload's run."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

from stepscope.bench.catalogue import load
from stepscope.bench.training_options import options_parser
from stepscope.errors import NotCapturedError, UnreadableInputError
from stepscope.records.bench_result import BenchResults, WorkloadResult
from stepscope.records.encode_json import encode_json
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.regular_files import is_folder, may_exist, read_whole
from stepscope.verify.runs import find_runs
from stepscope.verify.trial_steps import steady_steps

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.verify.runs import ComparedRun

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
            f"{file} is not what stepscope bench --save writes: {error}"
        ) from None
    if results.schema != SCHEMA:
        raise UnreadableInputError(
            f"{file} has schema {results.schema}, this stepscope reads {SCHEMA}: save it again"
        )
    if any(ms <= 0 for row in results.workloads for ms in (*row.runs_ms, *row.calibration_ms)):
        raise UnreadableInputError(f"{file} has a run that takes no time: save it again")
    return results


def _of_run(folder: Path) -> BenchResults:
    """One run: `stepscope run -- python -m stepscope.bench.train NAME`."""
    runs = find_runs(str(folder))
    rows = tuple(_row(run) for run in runs)
    command = runs[-1].facts.get("command") or ()
    return BenchResults(stepscope="", command=tuple(command), started_unix=0.0, workloads=rows)


def _row(run: ComparedRun) -> WorkloadResult:
    options = _options(run.facts.get("command") or ())
    if options is None:
        raise NotCapturedError(
            f"{run.path} is no run of a workload: its command does not start {_MODULE}"
        )
    steps = steady_steps(run.step_ms)
    if not len(steps):
        raise NotCapturedError(f"{run.path} has no steady step outside the profiler's window")
    changes = dict(change.split("=", 1) for change in options.set if "=" in change)
    return WorkloadResult(
        name=options.name,
        size=options.size,
        ranks=run.facts.get("world_size") or 1,
        settings=_settings(options, changes),
        remedies=tuple(remedy.id for remedy in run.facts.get("remedies", ())),
        runs_ms=(float(steps.mean()),),
        steps_ms=(tuple(steps.tolist()),),
        folder=run.path,
    )


def _settings(options: argparse.Namespace, changes: dict[str, str]) -> dict[str, Any]:
    try:
        return dict(load(options.name).config(options.size, changes))
    except KeyError as error:
        raise NotCapturedError(f"{options.name} no longer has the setting {error}") from None


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
