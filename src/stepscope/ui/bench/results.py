"""Run one row of a bench under capture and turn its runs into a result; add reruns and
scaling studies, and write results as CSV.
"""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.bench.against import compare_results
from stepscope.bench.results import BenchResults, Rerun, ScalingStudy, StudyPoint, WorkloadResult
from stepscope.bench.rules import (
    find_studies,
    mean_step,
    reach_target,
    speedup,
    with_straight_lines,
)
from stepscope.bench.steps import RunParts, StepParts, captured_per_step, mean_parts, whole_steps
from stepscope.errors import StepscopeError, UnreadableInputError
from stepscope.measure import folder as layout
from stepscope.measure.settings import Settings
from stepscope.records.explanation import Explanation
from stepscope.records.prediction import Setting
from stepscope.records.rank_facts import HostLoad
from stepscope.text.figures import unsigned_percent
from stepscope.text.words import counted
from stepscope.trace.decode import Oddities
from stepscope.trace.files import read_whole
from stepscope.trace.run_folder.rank_facts import RANK, decode_facts
from stepscope.ui.jobs.capture import NEVER, capture_to_end
from stepscope.ui.jobs.environment import own_python, own_ranks
from stepscope.ui.jobs.process import CommandEnd, last_lines
from stepscope.verify.runs import find_runs
from stepscope.verify.steady import FEWEST_STEPS, steady_steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.bench.task import BenchTask
    from stepscope.predict.engine import Bench
    from stepscope.records.hardware import Ceilings, Efficiency

    Floats = NDArray[np.float64]

# The runs of one row -> its result: throughput with an interval, and what the explanation knows.
#
# What was not captured stays None or empty, never zero.

_WORKING = ("compute", "exposed_comm", "exposed_memory")  # parts in which the device works


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedRun:
    """What the trace, the memory step and the counters of one run say."""

    fields: dict[str, Any] = field(default_factory=dict)  # of WorkloadResult
    shares: dict[str, float] = field(default_factory=dict)  # of the step, by part of the budget
    ceilings: Ceilings | None = None


def explain_run(run: BenchRun) -> ExplainedRun:
    """StepscopeError if the trace cannot be read."""
    from stepscope.explain.engines import Here
    from stepscope.explain.explain_job import JobTraces

    explanation, _ = JobTraces([run.folder], cache=False, engine=Here()).explain()
    shares = {part.id: part.share for part in explanation.budget.parts if part.share}
    uses = [rank.efficiency for rank in explanation.ranks if rank.efficiency is not None]
    fields = {
        "verdict": explanation.verdict,
        "busy": sum(shares.get(part, 0.0) for part in _WORKING) if shares else None,
        "cpu": processor_use(run.folder),
        **_efficiency(uses, run.captured_per_step),
        **_memory(explanation),
    }
    ceilings = next((use.ceilings for use in uses if use.ceilings is not None), None)
    return ExplainedRun(fields=fields, shares=shares, ceilings=ceilings)


def _efficiency(uses: Sequence[Efficiency], captured_per_step: float) -> dict[str, Any]:
    """Means over the ranks; FLOPs and bytes are those of one rank."""
    if not uses:
        return {}
    shares = [compute_share(use) for use in uses]
    kinds = dict.fromkeys(kind for share in shares for kind in share)
    moved = [spot.bytes_moved for use in uses for spot in use.spots if spot.bytes_moved is not None]
    mfus = [use.mfu for use in uses if use.mfu is not None]
    return {
        "mfu": sum(mfus) / len(mfus) if mfus else None,
        "compute_share": {
            kind: sum(share.get(kind, 0.0) for share in shares) / len(shares) for kind in kinds
        },
        "flops": captured_per_step * sum(use.model_flops for use in uses) / len(uses),
        "bytes_moved": captured_per_step * sum(moved) / len(uses) if moved else None,
    }


def compute_share(use: Efficiency) -> dict[str, float]:
    """Of the peak of each kind of product that the step had; "tensor" is the part of them that ran
    on tensor cores."""
    if not use.step_ms:
        return {}
    shares, tensor = {}, 0.0
    for row in use.by_dtype:
        if not row.peak_flops or not row.flops:
            continue
        share = row.flops / (row.peak_flops * use.devices * use.step_ms / 1e3)
        shares[row.dtype] = share
        tensor += share * row.tensor_core_ns / row.device_ns if row.device_ns else 0.0
    if shares and use.tensor_core_share is not None:
        shares["tensor"] = tensor
    return shares


def _memory(explanation: Explanation) -> dict[str, Any]:
    """Of the rank that needs most."""
    memories = [rank.memory for rank in explanation.ranks if rank.memory is not None]
    if not memories:
        return {}
    most = max(memories, key=lambda memory: memory.peak_bytes)
    known = {name: size for name, size in most.categories.items() if size is not None}
    return {"peak_bytes": most.peak_bytes, "memory": known}


def processor_use(folder: Path) -> float | None:
    """Processor time of the whole job over wall time and cores, in steps without the profiler."""
    places = sorted(place for place in folder.glob("rank-*") if "." not in place.name)
    known_loads = (decode_facts(place, Oddities(RANK)).host_load for place in places)
    loads = [load for load in known_loads if isinstance(load, HostLoad)]
    plains = [load.plain for load in loads if load.plain is not None and load.plain.wall_ns]
    if not plains or not loads[0].room:
        return None
    first = plains[0]
    if first.job_ns is not None:  # with the loader's workers and the other ranks
        return first.job_ns / first.wall_ns / loads[0].room
    used = [plain.used_cores for plain in plains]
    known = [cores for cores in used if cores is not None]
    return sum(known) / loads[0].room if len(known) == len(loads) else None


def workload_result(
    task: BenchTask, runs: Sequence[BenchRun], explained: ExplainedRun | None
) -> WorkloadResult:
    """`explained` is the first run, None if it could not be explained."""
    known = {**_of_task(task), "seconds": sum(run.seconds for run in runs) if runs else None}
    measured = [run for run in runs if run.failed is None]
    failures = [run for run in runs if run.failed is not None]
    if not measured:
        why = failures[0].failed if failures else None
        folder = str(failures[0].folder) if failures else None
        return WorkloadResult(
            **known, status="failed" if failures else "not run", why=why, folder=folder
        )
    step = mean_step([run.steps_ms for run in measured])
    explained = explained or ExplainedRun()
    losses = measured[0].losses
    outcome = reach_target(losses, task.target, step.ms)
    return WorkloadResult(
        **known,
        **explained.fields,
        status="failed" if failures else "measured",
        why=failures[0].failed if failures else None,
        samples_per_s=task.samples / step.ms * 1e3,
        low=task.samples / step.high_ms * 1e3,
        high=task.samples / step.low_ms * 1e3 if step.low_ms else None,
        step_ms=step.ms,
        runs_ms=tuple(float(run.steps_ms.mean()) for run in measured),
        steps_ms=tuple(tuple(run.steps_ms.tolist()) for run in measured),
        calibration_ms=tuple(
            run.calibration_ms for run in measured if run.calibration_ms is not None
        ),
        **_split(measured),
        budget_ms={part: share * step.ms for part, share in explained.shares.items()},
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        target_reached=outcome.reached,
        steps_to_target=outcome.steps,
        time_to_target_s=outcome.seconds,
        notes=tuple(dict.fromkeys(note for run in measured for note in run.notes)),
        folder=str(measured[0].folder),
    )


def _split(runs: Sequence[BenchRun]) -> dict[str, Any]:
    """Nothing unless every run has it."""
    known = [run.parts for run in runs if run.parts is not None]
    if len(known) < len(runs):
        return {}
    return {
        "computing_ms": tuple(parts.computing_ms for parts in known),
        "queue_ms": tuple(parts.queue_ms for parts in known),
        "waiting_ms": tuple(parts.waiting_ms for parts in known),
    }


def _of_task(task: BenchTask) -> dict[str, Any]:
    return {
        "name": task.workload.name,
        "size": task.size,
        "ranks": task.ranks,
        "settings": {name: _as_json(value) for name, value in task.config.items()},
        "remedies": task.remedies,
        "samples": task.workload.samples,
        "target_loss": task.target.loss,
    }


def _as_json(value: Any) -> float | int | str:
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, int | float | str) else str(value)


def with_speedups(results: Sequence[WorkloadResult]) -> tuple[WorkloadResult, ...]:
    """Rows with remedies get their speed beside the row of the same workload without."""
    plain = {
        (row.name, row.size, row.ranks): row
        for row in results
        if not row.remedies and row.status == "measured"
    }
    return tuple(_with_speedup(row, plain.get((row.name, row.size, row.ranks))) for row in results)


def _with_speedup(row: WorkloadResult, plain: WorkloadResult | None) -> WorkloadResult:
    if plain is None or not row.remedies or row.status != "measured":
        return row
    value, low, high = speedup(plain.runs_ms, row.runs_ms)
    return replace(row, speedup=value, speedup_low=low, speedup_high=high)


# One run of a workload under capture: its steady steps, its losses, and why it failed if it did.
#
# The first run of a row also records a trace and measures memory, in its last steps: what the
# profiler leaves behind in the process then slows no step that counts.

LOSSES = "losses.json"
PACED_S = 2.0  # of steps and yardsticks in a paced run
_MOST_LOSSES_BYTES = 64 << 20
_WARMUP, _ACTIVE = 2, 3  # of the window
_AFTER_WINDOW = 4  # a plain step, the memory step, and two more so that its end is seen
_SIGNALS = 128
_READ_LINES = 200
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception|Interrupt)\b.*)")
_LAUNCHERS_OWN = "ChildFailedError"


class TrainedLosses(msgspec.Struct, frozen=True, kw_only=True):
    """losses.json, as bench/train.py writes it; None for a loss that is no finite number."""

    losses: tuple[float | None, ...] = ()
    calibration_ms: float | None = None  # the machine's pace before the run
    parts: StepParts | None = None  # of each step; None where the system does not count
    step_over_yardstick: float | None = None  # of a paced run, which has nothing else
    computing_over_yardstick: float | None = None  # the same by processor time


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """One start of a row's command."""

    number: int
    folder: Path
    seconds: float
    failed: str | None = None
    steps_ms: Floats = field(default_factory=lambda: np.empty(0))  # steady ones, in order
    captured_per_step: float = 1.0  # steps that capture saw, for each of the workload's
    losses: tuple[float | None, ...] = ()
    calibration_ms: float | None = None
    parts: RunParts | None = None  # of the mean steady step
    notes: tuple[str, ...] = ()  # remedies that were not applied, and why


def run_once(task: BenchTask, number: int, home: Path) -> BenchRun:
    """The first run (1) has a trace and memory. A run that fails is an answer too."""
    folder = home / f"{_safe(task.name)}-{number}"
    settings = _settings(task, folder, window=number == 1)
    command = training_command(task, folder.absolute() / LOSSES)
    began = time.monotonic()
    known: dict[str, Any] = {"number": number, "folder": folder, "seconds": 0.0}
    try:
        end, ranks = capture_to_end(command, folder, settings)
        known["seconds"] = time.monotonic() - began
        failed = _why_failed(folder, end)
        return BenchRun(**known, failed=failed) if failed else _read(task, ranks, known)
    except StepscopeError as error:
        return BenchRun(**known, failed=str(error))
    except OSError as error:
        why = f"{folder} cannot be written: {layout.why_refused(error)}"
        return BenchRun(**known, failed=why)


class PacedRun(NamedTuple):
    """A run's step over a yardstick that is timed in turns with it."""

    step: float
    computing: float  # by processor time


def run_paced(task: BenchTask, number: int, home: Path) -> PacedRun | None:
    """None if it failed."""
    folder = home / f"{_safe(task.name)}-paced-{number}"
    command = training_command(task, folder.absolute() / LOSSES, PACED_S)
    try:
        end, _ = capture_to_end(command, folder, _settings(task, folder, window=False))
        trained = TrainedLosses() if end.code else read_losses(folder)
    except (StepscopeError, OSError):
        return None
    step, computing = trained.step_over_yardstick, trained.computing_over_yardstick
    return PacedRun(step, computing) if step and computing else None


def _settings(task: BenchTask, folder: Path, *, window: bool) -> Settings:
    return Settings(
        folder=str(folder.absolute()),
        wait=_wait(task) if window else NEVER,
        warmup=_WARMUP,
        active=_ACTIVE,
        memory=window,
        sample_hz=0.0,
        remedies=task.remedies,
    )


def _wait(task: BenchTask) -> int:
    return task.all_steps - _WARMUP - _ACTIVE - _AFTER_WINDOW


def _read(task: BenchTask, ranks: list[dict[str, Any]], known: dict[str, Any]) -> BenchRun:
    folder: Path = known["folder"]
    trained = read_losses(folder)
    seen = max((rank.get("steps") or 0 for rank in ranks), default=0)
    per_step = captured_per_step(seen, task.all_steps)
    run = find_runs(str(folder))[0]
    steps = whole_steps(steady_steps(run.step_ms), per_step)
    if len(steps) < FEWEST_STEPS:
        why = (
            f"only {counted(len(steps), 'steady step')} were measured, but {FEWEST_STEPS} are "
            "needed. Ask for more with --steps"
        )
        return BenchRun(**known, failed=why)
    return BenchRun(
        **known,
        steps_ms=steps,
        captured_per_step=per_step,
        losses=trained.losses,
        calibration_ms=trained.calibration_ms,
        parts=mean_parts(trained.parts, plain_steps(task, known["number"], per_step))
        if trained.parts is not None
        else None,
        notes=tuple(one.words for one in run.facts["remedies"] if one.outcome != "applied"),
    )


def plain_steps(task: BenchTask, number: int, per_step: float) -> int:
    """The workload's steps before the window, which is only in the first run and counts the steps
    that capture sees."""
    return int(_wait(task) / per_step) if number == 1 else task.all_steps


def read_losses(folder: Path) -> TrainedLosses:
    """UnreadableInputError without them."""
    content = read_whole(folder / LOSSES, _MOST_LOSSES_BYTES)
    try:
        return msgspec.json.decode(content, type=TrainedLosses)
    except msgspec.MsgspecError as error:
        raise UnreadableInputError(f"{folder / LOSSES}: {error}") from None


def _why_failed(folder: Path, end: CommandEnd) -> str | None:
    if not end.code:
        return None
    lines = [line for line in last_lines(folder, _READ_LINES) if line.strip()]
    errors = [match[1] for line in lines if (match := _ERROR.match(line))]
    raised = next((line for line in reversed(errors) if _LAUNCHERS_OWN not in line), None)
    if raised is not None:
        return raised
    if end.code > _SIGNALS:
        return f"it was ended by signal {end.code - _SIGNALS}"
    last = f": {lines[-1].strip()}" if lines else ""
    return f"it ended with exit code {end.code}{last}"


def _safe(name: str) -> str:
    return "".join(char if char.isalnum() or char in "+-=._" else "_" for char in name)[:80]


# The command that trains one row of a bench: an ordinary script, as a user would start it.

_MODULE = "stepscope.bench.train"


def training_command(
    task: BenchTask, losses: Path, paced_s: float | None = None
) -> tuple[str, ...]:
    """`losses` is where it writes the loss of every step; a paced run, its ratio."""
    changes = (f"--set={name}={value}" for name, value in task.changes.items())
    arguments = (
        task.workload.name,
        f"--size={task.size}",
        f"--steps={task.all_steps}",
        f"--seed={task.seed}",
        f"--losses={losses}",
        *((f"--paced={paced_s}",) if paced_s else ()),
        *changes,
    )
    if task.ranks > 1:
        return tuple(own_ranks(task.ranks, _MODULE, *arguments))
    return tuple(own_python(_MODULE, *arguments))


# A saved file whose command was run again: whether the new results agree with the saved ones.


def with_rerun(base: BenchResults, now: BenchResults, path: str) -> BenchResults:
    """The saved results with one more entry in `reruns`."""
    changes = compare_results(base, now, path).workloads
    compared = [change for change in changes if change.verdict != "not comparable"]
    differs = tuple(
        f"{change.name} is {unsigned_percent(change.counted_change or 0.0)} {change.verdict}"
        for change in compared
        if change.verdict != "no difference seen"
    )
    rerun = Rerun(
        started_unix=now.started_unix,
        host=now.machine.host if now.machine else "",
        stepscope=now.stepscope,
        agrees=not differs if compared else None,
        differs=differs,
    )
    return replace(base, reruns=(*base.reruns, rerun))


# Scaling studies with predictions: the first point's run, changed by what-ifs, gives the others.
#
# The prediction knows nothing of the other runs, so the curves can disagree.


def with_studies(results: BenchResults, open_run: Callable[[str], Bench]) -> BenchResults:
    """Nothing changes for a bench whose rows are all different workloads."""
    studies = find_studies(results.workloads)
    predicted = (
        with_straight_lines(_predicted(study, results.workloads[place].folder, open_run))
        for place, study in studies.items()
    )
    return replace(results, scaling=tuple(predicted))


def _predicted(
    study: ScalingStudy, folder: str | None, open_run: Callable[[str], Bench]
) -> ScalingStudy:
    """As it is, with why, if the first point has no run to predict from."""
    if study.points[0].samples_per_s is None or folder is None:
        return replace(study, notes=("there is no prediction: the first point was not measured",))
    try:
        bench = open_run(folder)
    except StepscopeError as error:
        return replace(study, notes=(f"there is no prediction: {error}",))
    return predict_points(replace(study, predicted_from=folder), bench)


def predict_points(study: ScalingStudy, bench: Bench) -> ScalingStudy:
    """Every point from the first one."""
    first, *others = study.points
    points = [first]
    notes: list[str] = []
    for point in others:
        prediction = bench.predict(_changes(first, point))
        if prediction.refused:
            notes += prediction.refused
            points.append(point)
            continue
        base = (first.samples_per_s or 0.0) * prediction.samples_factor
        points.append(
            replace(
                point,
                predicted_samples_per_s=base * prediction.speedup,
                predicted_low=base * prediction.speedup_low,
                predicted_high=base * prediction.speedup_high,
            )
        )
    return replace(study, points=tuple(points), notes=tuple(dict.fromkeys(notes)))


def _changes(first: StudyPoint, point: StudyPoint) -> Sequence[Setting]:
    changes = []
    if point.batch != first.batch:
        changes.append(Setting(name="batch", value=f"x{point.batch / first.batch:g}"))
    if point.ranks != first.ranks:
        changes.append(Setting(name="workers", value=str(point.ranks)))
    return changes


# A bench's results as CSV: one line a row, one column a number; empty where it is not known.

_LEFT_OUT = ("steps_ms",)  # thousands of numbers: the JSON has them


def write_csv(results: BenchResults, path: Path) -> None:
    """OSError if it cannot be written."""
    rows = [_flat(row) for row in results.workloads]
    columns = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns), restval="")
        writer.writeheader()
        writer.writerows(rows)


def _flat(row: WorkloadResult) -> dict[str, Any]:
    """memory {"parameters": 4} is the column memory.parameters; several values are one cell."""
    flat: dict[str, Any] = {}
    for name, value in msgspec.structs.asdict(row).items():
        if name in _LEFT_OUT:
            continue
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return flat
