"""The runs of one row -> its result: throughput with an interval, and what the explanation knows.

What was not captured stays None or empty, never zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from stepscope.bench.rules import mean_step, speedup
from stepscope.bench.targets import reach_target
from stepscope.records.bench_result import WorkloadResult
from stepscope.records.host_load import HostLoad
from stepscope.trace.decode import Oddities
from stepscope.trace.rank_facts import RANK, decode_facts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.bench.task import BenchTask
    from stepscope.records.efficiency import Ceilings, Efficiency
    from stepscope.records.explanation import Explanation
    from stepscope.ui.bench.runs import BenchRun

_WORKING = ("compute", "exposed_comm", "exposed_memory")  # parts in which the device works


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedRun:
    """What the trace, the memory step and the counters of one run say."""

    fields: dict[str, Any] = field(default_factory=dict)  # of WorkloadResult
    shares: dict[str, float] = field(default_factory=dict)  # of the step, by part of the budget
    ceilings: Ceilings | None = None


def explain_run(run: BenchRun) -> ExplainedRun:
    """StepscopeError if the trace cannot be read."""
    from stepscope.explain.explain_job import JobTraces
    from stepscope.explain.pool_engine import Here

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
