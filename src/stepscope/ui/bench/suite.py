"""Run all rows of a bench in turns, on a machine that is described and has room for them;
keep what is known when a row fails or somebody interrupts.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import platform
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

import stepscope
from stepscope.bench.against import MOST_S, SEEN, EnoughRuns
from stepscope.bench.request import BenchRequest
from stepscope.bench.results import (
    LIMIT_S,
    BenchMachine,
    BenchResults,
    PeakRequest,
    PredictedPeak,
    WorkloadResult,
)
from stepscope.bench.rules import CLAIM_RUNS, broken_rules, in_turns
from stepscope.bench.saved_results import RESULTS, write_results
from stepscope.bench.task import BenchTask
from stepscope.errors import StepscopeError, UsageError
from stepscope.measure import folder as layout
from stepscope.measure.machine import counters, growth
from stepscope.records.processors import allowed_cores, clock_mhz, processor_name
from stepscope.text.figures import percent, size
from stepscope.text.words import counted
from stepscope.ui.bench.results import (
    BenchRun,
    ExplainedRun,
    PacedRun,
    explain_run,
    run_once,
    run_paced,
    with_speedups,
    workload_result,
)
from stepscope.ui.jobs.environment import own_python
from stepscope.ui.jobs.process import raising_on_signals

if TYPE_CHECKING:
    from stepscope.ui.progress import TuneProgress

_INTERRUPTED, _FAILED = 130, 1


@dataclass(slots=True, kw_only=True)
class TaskRow:
    """A task and what is known of it so far."""

    task: BenchTask
    runs: list[BenchRun] = field(default_factory=list)
    paced: list[PacedRun] = field(default_factory=list)
    paced_s: float = 0.0  # that these took
    cannot_be_paced: bool = False
    explained: ExplainedRun | None = None
    not_run: str | None = None  # why
    predicted_peak_bytes: int | None = None

    @property
    def gave_up(self) -> bool:
        """It failed: further runs would fail too."""
        return self.not_run is not None or any(run.failed is not None for run in self.runs)

    def result(self) -> WorkloadResult:
        result = workload_result(self.task, self.runs, self.explained)
        result = replace(
            result,
            predicted_peak_bytes=self.predicted_peak_bytes,
            paced=tuple(run.step for run in self.paced),
            paced_computing=tuple(run.computing for run in self.paced),
            seconds=result.seconds + self.paced_s if result.seconds is not None else None,
        )
        return replace(result, why=self.not_run) if not self.runs else result


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteEnd:
    """The results, and the process's exit code."""

    results: BenchResults
    code: int


def run_suite(
    tasks: Sequence[BenchTask],
    *,
    runs: int,
    folder: Path,
    command: tuple[str, ...],
    progress: TuneProgress,
    check_memory: bool = True,
    enough: EnoughRuns | None = None,
) -> SuiteEnd:
    """Ctrl-C and SIGTERM end it with what is known. What needs too much memory is not run. After
    `runs` of each, more are made until there are `enough`."""
    suite = _Suite([TaskRow(task=task) for task in tasks], runs, folder, command, progress)
    code = 0
    try:
        with raising_on_signals(
            (signal.SIGTERM, signal.SIGHUP), lambda number: SystemExit(128 + number)
        ):
            suite.run(check_memory=check_memory)
            if enough is not None and enough.can_help(suite.machine):
                suite.add_runs(enough)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except SystemExit as stop:  # a signal
        code = stop.code if isinstance(stop.code, int) else _FAILED
    return suite.end(code)  # also of what was interrupted


class _Suite:
    def __init__(
        self,
        rows: list[TaskRow],
        runs: int,
        folder: Path,
        command: tuple[str, ...],
        progress: TuneProgress,
    ) -> None:
        self._rows, self._runs, self._folder = rows, runs, folder
        self._progress = progress
        self._results = BenchResults(
            stepscope=stepscope.__version__,
            command=command,
            started_unix=time.time(),
            rules={
                "runs": runs,
                "runs_for_a_claim": CLAIM_RUNS,
                "dropped": 2 if runs >= CLAIM_RUNS else 0,
                "interleaved": len(rows) > 1 and runs > 1,
                "seed": rows[0].task.seed if rows else 0,
            },
        )

    @property
    def machine(self) -> BenchMachine | None:
        return self._results.machine

    def run(self, *, check_memory: bool) -> None:
        self._results = replace(self._results, machine=describe_machine())
        rows = {id(row.task): row for row in self._rows}
        if check_memory:
            self._predict_memory()
        turns = list(in_turns([row.task for row in self._rows], self._runs))
        for place, (number, task) in enumerate(turns, 1):
            row = rows[id(task)]
            if not row.gave_up:
                again = f", run {number} of {self._runs}" if self._runs > 1 else ""
                self._progress.trying(f"{place} of {len(turns)}: {task.name}{again}")
                self._run_once(row, number)

    def add_runs(self, enough: EnoughRuns) -> None:
        """In turns: runs beside a yardstick where they can be made, then more of those rows that
        differ too much from start to start."""
        for row in self._rows:
            row.cannot_be_paced = not enough.paces(row.result(), self.machine)
        for _ in range(CLAIM_RUNS):
            for row in self._rows:
                if not row.gave_up and not row.cannot_be_paced:
                    self._run_paced(row, "timed beside a reference load")
        while rows := [
            row for row in self._rows if not row.gave_up and not enough.are_there(row.result())
        ]:
            for row in rows:
                why = f"its starts differ too much to see a change of {percent(SEEN)}"
                if not row.cannot_be_paced and enough.wants_paced(row.result()):
                    self._run_paced(row, why)
                    continue
                number = len(row.runs) + 1
                self._progress.trying(f"{row.task.name}, run {number}: {why}")
                self._run_once(row, number)

        for row in self._rows:
            self._say_what_is_seen(row, enough)

    def _say_what_is_seen(self, row: TaskRow, enough: EnoughRuns) -> None:
        """Where that is less than asked for."""
        seen = None if row.gave_up else enough.smallest_seen(row.result())
        if seen is None or seen.step <= SEEN:
            return
        waits = f", and a longer wait from {percent(seen.waiting)} of it on" if seen.waiting else ""
        self._progress.news(
            f"{row.task.name}: its starts differ too much to see {percent(SEEN)} within "
            f"{MOST_S / 60:.0f} minutes. In 4 of 5 cases these runs see a slower step from "
            f"{percent(seen.step)} on{waits}. --runs makes more"
        )

    def _run_paced(self, row: TaskRow, why: str) -> None:
        number = len(row.paced) + 1
        self._progress.trying(f"{row.task.name}, paced run {number}: {why}")
        began = time.monotonic()
        run = run_paced(row.task, number, self._folder)
        row.paced_s += time.monotonic() - began
        if run is None:
            row.paced, row.cannot_be_paced = [], True  # ordinary runs are compared
        else:
            row.paced.append(run)
        self._write()

    def _predict_memory(self) -> None:
        tasks = [row.task for row in self._rows if worth_predicting(row.task)]
        if not tasks:
            return
        self._progress.trying(f"predicting the memory of {counted(len(tasks), 'workload')}")
        peaks = predict_peaks(tasks)
        for row in self._rows:
            peak = peaks.of(row.task)
            if peak is None:
                continue
            row.predicted_peak_bytes = peak.peak_bytes
            if peak.fits is False:
                row.not_run = too_large(peak)
                self._progress.news(f"{row.task.name} is not run: it {row.not_run}")

    def _run_once(self, row: TaskRow, number: int) -> None:
        run = run_once(row.task, number, self._folder)
        row.runs.append(run)
        if run.failed is not None:
            self._progress.news(f"{row.task.name} failed: {run.failed}")
        elif number == 1:
            self._explain(row, run)
        self._write()

    def _explain(self, row: TaskRow, run: BenchRun) -> None:
        try:
            row.explained = explain_run(run)
        except StepscopeError as error:
            self._progress.news(f"{row.task.name} could not be explained: {error}")
        gc.collect()  # it is off while a verb runs, and a trace is large
        machine, ceilings = self._results.machine, row.explained and row.explained.ceilings
        if machine is None or not ceilings or machine.peak_flops:
            return
        machine = replace(
            machine,
            peak_flops=ceilings.flops,
            peak_bytes_s=ceilings.bytes_s,
            peak_source=ceilings.source,
        )
        self._results = replace(self._results, machine=machine)

    def end(self, code: int) -> SuiteEnd:
        """With the clocks as they are now, right after the last run."""
        for row in self._rows:
            if not row.runs and row.not_run is None:
                row.not_run = "interrupted"
        machine = self._results.machine
        if machine is not None:
            after = {f"{name}_after": mhz for name, mhz in read_clocks().items()}
            self._results = replace(
                self._results, machine=replace(machine, clocks={**machine.clocks, **after})
            )
        results = self._write()
        bad = any(row.status != "measured" for row in results.workloads)
        return SuiteEnd(results=results, code=code or (_FAILED if bad else 0))

    def _write(self) -> BenchResults:
        """bench.json in the folder holds what is known at any time."""
        rows = with_speedups([row.result() for row in self._rows])
        broken = broken_rules(rows, self._results.machine, changed=self._changed())
        results = replace(self._results, workloads=rows, broken_rules=broken)
        try:
            write_results(results, self._folder / RESULTS)
        except OSError as error:
            why = layout.why_refused(error)
            self._progress.news(f"{self._folder / RESULTS} cannot be written: {why}")
        return results

    def _changed(self) -> list[str]:
        changes = {
            f"{name}={value}" for row in self._rows for name, value in row.task.changes.items()
        }
        steps = {f"steps={row.task.steps}" for row in self._rows if row.task.steps is not None}
        return sorted({*changes, *steps})


# Whether workloads fit the memory that is free here, said before anything runs.
#
# A program of its own predicts (bench/predict_peak.py): it may hold a GPU and must give it back.

_PROGRAM = own_python("stepscope.bench.predict_peak")
_START_S = 120.0  # that importing torch and starting CUDA may take


@dataclass(frozen=True, slots=True)
class PredictedPeaks:
    """Of the tasks of one bench."""

    by_request: dict[bytes, PredictedPeak] = field(default_factory=dict)

    def of(self, task: BenchTask) -> PredictedPeak | None:
        """None with remedies, which change what is held."""
        return None if task.remedies else self.by_request.get(_encode(task))


def worth_predicting(task: BenchTask) -> bool:
    """Workloads of the smallest size fit everywhere, unless somebody changes them."""
    return not task.remedies and (task.size != "tiny" or bool(task.changes))


def predict_peaks(tasks: Sequence[BenchTask]) -> PredictedPeaks:
    """Takes seconds for each; a training whose prediction crashes is left out."""
    waiting = list(dict.fromkeys(_encode(task) for task in tasks if worth_predicting(task)))
    known: dict[bytes, PredictedPeak] = {}
    while waiting:
        answers = _ask(waiting)
        known |= zip(waiting, answers, strict=False)
        waiting = waiting[len(answers) + 1 :]  # the next one ended the program
    return PredictedPeaks(known)


def too_large(peak: PredictedPeak) -> str:
    """needs about 96 GB on the GPU, 80 GB are free; --set batch=24 would fit."""
    where = "on the GPU" if peak.device == "cuda" else "of memory"
    each = f" for each of {counted(peak.ranks, 'rank')}" if peak.ranks > 1 else ""
    words = f"needs about {size(peak.peak_bytes or 0)} {where}{each}, "
    words += f"{size(peak.free_bytes or 0)} are free"
    if peak.fitting_batch is None:
        return f"{words}. Even a small batch does not fit"
    return f"{words}. --set batch={peak.fitting_batch} fits"


def _ask(requests: Sequence[bytes]) -> list[PredictedPeak]:
    """As many as were answered before the program ended, in order."""
    limit_s = _START_S + LIMIT_S * len(requests)
    try:
        output = subprocess.run(
            _PROGRAM, input=b"\n".join(requests), capture_output=True, timeout=limit_s, check=False
        ).stdout
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
    answers = []
    for line in output.splitlines():
        try:
            answers.append(msgspec.json.decode(line, type=PredictedPeak))
        except msgspec.DecodeError:
            continue  # a workload's own output
    return answers


def _encode(task: BenchTask) -> bytes:
    request = PeakRequest(
        name=task.workload.name, size=task.size, changes=dict(task.changes), ranks=task.ranks
    )
    return msgspec.json.encode(request)


# Where a bench was measured: hardware, versions, clocks, and how busy others kept the machine.

_LOOK_S = 0.3  # the system counts in hundredths of a second
_ASK_S = 5.0
_COUNT_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_GPU_CLOCKS = ("sm", "mem")  # as nvidia-smi names them


def require_torch() -> None:
    """UsageError without it."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            "bench trains with torch, which is not installed in this Python: pip install torch"
        )


def require_gpu(request: BenchRequest) -> None:
    """UsageError for the published shape on a machine without a GPU."""
    if request.size == "paper" and not gpu_count():
        names = " ".join(request.names)
        runs_here = " ".join(("stepscope bench", *filter(None, [names]), "--size tiny"))
        raise UsageError(
            "--size paper is the published size and needs a GPU, but torch finds none",
            f"{runs_here} runs on this machine's {counted(allowed_cores(), 'core')}",
        )


def gpu_count() -> int:
    """CUDA devices that torch can use; this process gets no context on them."""
    import torch

    # NVML counts devices without starting CUDA in this process.
    before = os.environ.get(_COUNT_BY_NVML)
    os.environ[_COUNT_BY_NVML] = "1"
    try:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    finally:
        if before is None:
            del os.environ[_COUNT_BY_NVML]  # the trainings see what the user has set
        else:
            os.environ[_COUNT_BY_NVML] = before


def describe_machine() -> BenchMachine:
    """Before the first run: nothing of ours may be at work."""
    import torch

    return BenchMachine(
        host=socket.gethostname(),
        processor=processor_name(),
        cores=allowed_cores(),
        device=next(iter(_ask_gpu(["name"])), None) if gpu_count() else None,
        devices=gpu_count(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        python=platform.python_version(),
        clocks={f"{name}_before": mhz for name, mhz in read_clocks().items()},
        load=busy_cores(),
    )


def busy_cores() -> float | None:
    """The cores that anybody keeps busy while we wait; None where the system does not say."""
    before = counters(several=False)
    time.sleep(_LOOK_S)
    change = growth(before, counters(several=False))
    if change["busy_ns"] is None or not change["wall_ns"]:
        return None
    return float(change["busy_ns"] / change["wall_ns"])


def read_clocks() -> dict[str, float]:
    """MHz by kind: cpu, and of the first GPU sm, mem and their maximum. Not known ones are left
    out."""
    clocks = {}
    if (mhz := clock_mhz()) is not None:
        clocks["cpu"] = mhz
    names = [*_GPU_CLOCKS, *(f"max.{name}" for name in _GPU_CLOCKS)]
    for name, text in zip(names, _ask_gpu([f"clocks.{name}" for name in names]), strict=False):
        with contextlib.suppress(ValueError):
            clocks[name.replace(".", "_")] = float(text)
    return clocks


def _ask_gpu(fields: list[str]) -> list[str]:
    """What nvidia-smi says of the first GPU; empty without one."""
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = done.stdout.splitlines()
    return [value.strip() for value in lines[0].split(",")] if lines else []
