"""Explain one rank: its trace file, every part of its step, its memory; and cut its tables
to their longest rows. It runs where the file is read: in this process, in a worker, or
elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace

from stepscope.errors import StepscopeError, UnreadableInputError
from stepscope.explain.batch import read_batch
from stepscope.explain.budget import (
    budget_of_record,
    periodic_work_ns,
    with_correction,
    with_host,
    with_measured,
)
from stepscope.explain.compiled.summary import explain_compiled
from stepscope.explain.cpu_use import measure_cpu_use
from stepscope.explain.efficiency import about_peaks, measure_efficiency
from stepscope.explain.findings import find_in_rank
from stepscope.explain.findings.evidence import RankEvidence
from stepscope.explain.host_calls import (
    list_lines,
    list_modules,
    list_operators,
    list_syncs,
    sum_device_time,
)
from stepscope.explain.job.rank_part import calls_of_folder, find_membership
from stepscope.explain.kernels import describe_launches, launched_in, list_copies, list_kernels
from stepscope.explain.memory.captured import (
    UNKNOWN_POOLS,
    capture_lines,
    find_largest,
    is_account,
    is_known_to_grow,
    memory_of_capture,
)
from stepscope.explain.memory.lifetimes import growth_of_steps
from stepscope.explain.memory.model import (
    StepCalls,
    find_transformer,
    make_theory,
    transformer_activations,
)
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.records.compiled import CompiledWork
from stepscope.records.explanation import RankExplanation, Steps, StepTime
from stepscope.records.hardware import Profile
from stepscope.records.job import RankFolder, RankPart
from stepscope.records.memory import (
    CapturedMemory,
    LimitFrom,
    Memory,
    Theory,
)
from stepscope.records.quality import Note
from stepscope.records.rank import MeasuredSteps, MemoryInputs, RankInputs, StepColumns
from stepscope.records.run import RankRun
from stepscope.records.strategies import RankFullySharded, RankStrategy
from stepscope.records.trace import Trace
from stepscope.step.collectives import list_collectives
from stepscope.step.cuda_graphs import has_graphs, note_uncorrected, replayed_share
from stepscope.step.timeline import divide, make_budget, split_idle
from stepscope.step.work import Work
from stepscope.text.figures import factor
from stepscope.trace.discover import TraceFile, on_disk
from stepscope.trace.files import is_pickle, read_head
from stepscope.trace.read import AS_USUAL, ReadOptions, read_rank_inputs
from stepscope.trace.run_folder.run_state import is_server_file

if TYPE_CHECKING:
    from stepscope.trace.files import Progress

# Everything about one rank.


def explain_rank(
    trace: Trace,
    truth: MeasuredSteps | None = None,
    folder: RankFolder | None = None,
    profile: Profile | None = None,
) -> RankExplanation:
    """Explain one rank by its trace and, if given, the steps measured without the profiler, the
    rank's folder and its machine's calibration."""
    calibrations = (profile,) if profile else ()
    inputs = RankInputs(trace=trace, measured=truth, folder=folder, calibrations=calibrations)
    return explain_analysis(RankAnalysis(inputs))


def explain_analysis(analysis: RankAnalysis) -> RankExplanation:
    """As `explain_rank`; its results stay in the analysis for later use."""
    trace, folder = analysis.trace, analysis.inputs.folder
    work, steps = analysis.work, analysis.steps
    timeline, host = analysis.timeline, analysis.host_time
    idle, gaps = split_idle(trace, work, host)
    window = (steps.window_start_ns, steps.window_end_ns)
    in_step, idle_in_step, gaps_in_step = timeline, idle, gaps
    if steps.cycles_ns:
        in_step = divide(work, window)
        idle_in_step, gaps_in_step = split_idle(trace, work, host, window)
    run = analysis.run
    step_ms = with_measured(StepTime(profiled=analysis.profiled_ms), analysis.measured, run)
    step_ms = with_host(with_correction(step_ms, analysis), analysis)
    profiled_budget = make_budget(steps, step_ms, in_step, idle_in_step)
    budget = budget_of_record(
        profiled_budget,
        step_ms,
        run=run,
        measured=analysis.measured,
        on_host=work.on_host,
        graphs=has_graphs(trace),
    )
    efficiency = measure_efficiency(analysis, step_ms)
    device_time = sum_device_time(trace, work, analysis.costs)
    kernels = list_kernels(trace, work, steps)
    launches = describe_launches(trace, work)
    copies = list_copies(trace, work)
    syncs = list_syncs(trace, host.blocking)
    (calls, _), pace = analysis.collective_calls, analysis.rank_steps
    collectives = list_collectives(calls)
    memory = explain_memory(analysis)
    compiled = explain_compiled(analysis)
    findings = find_in_rank(
        RankEvidence(
            trace=trace,
            on_host=work.on_host,
            timeline=in_step,
            whole=timeline,
            idle=idle_in_step,
            gaps=gaps_in_step,
            budget=budget,
            kernels=kernels,
            launches=launches,
            launched=launched_in(
                trace,
                work,
                in_step.start_ns,
                in_step.start_ns + in_step.span_ns,
                analysis.costs,
            ),
            copies=copies,
            syncs=syncs,
            collectives=collectives,
            efficiency=efficiency,
            memory=memory,
            cpu=analysis.compute_once(measure_cpu_use),
            strategies=analysis.strategies,
            layout=folder.layout if folder else {},
            similar=folder.similar if folder else None,
            cycles=max(1, len(steps.cycles_ns)),
            run=run,
            compiled=compiled,
            replayed=replayed_share(trace),
            longer_work_ns=periodic_work_ns(analysis, run),
        )
    )
    return RankExplanation(
        path=trace.path,
        rank=trace.rank,
        world_size=trace.world_size,
        device=trace.device_name,
        kind=trace.kind,
        events=trace.events,
        timeline=timeline,
        idle=idle,
        gaps=gaps,
        steps=steps,
        step_ms=step_ms,
        budget=budget,
        kernels=kernels,
        operators=list_operators(trace, device_time),
        modules=list_modules(trace, device_time),
        lines=list_lines(trace, device_time),
        launches=launches,
        copies=copies,
        syncs=syncs,
        collectives=collectives,
        part=RankPart(
            rank=trace.rank or 0,
            calls=calls,
            pace=pace,
            rounds=folder.rounds if folder else (),
            keeping=folder.keeping if folder else None,
            clock_notes=folder.clock_notes if folder else (),
            host=folder.host if folder else None,
            network_place=folder.network_place if folder else None,
            world_size=trace.world_size,
            member=find_membership(folder, trace, calls, pace),
            run=calls_of_folder(folder, analysis.inputs.steps),
            links=folder.links if folder else None,
        ),
        strategies=analysis.strategies,
        findings=findings,
        quality=(
            *trace.quality,
            *_notes(trace, work, steps),
            *note_uncorrected(trace, step_ms),
            *note_other_inputs(analysis.inputs.steps, run),
            *(about_peaks(efficiency) if efficiency else ()),
            *(folder.notes if folder else ()),
            *analysis.inputs.memory.notes,
        ),
        efficiency=efficiency,
        memory=memory,
        profiled_budget=profiled_budget,
        run=run,
        compiled=compiled,
    )


def _notes(trace: Trace, work: Work, steps: Steps) -> Iterator[Note]:
    if not len(work):
        yield Note(id="no-work", detail="the trace holds no operator and no device event")
    elif work.on_host and trace.kind != "cpu":
        yield Note(
            id="no-device-events",
            detail="the trace has runtime calls but no device event: the CPU's side is shown "
            "(record with ProfilerActivity.CUDA to see the device)",
        )
    if steps.source != "profiler":
        how = {
            "optimizer": "its steps end with the optimizer's",
            "repeated": f"its steps were found by repeating {steps.repeats}",
            "window": "it is explained as one span of time, and nothing is predicted from it",
        }[steps.source]
        yield Note(id="no-step-marks", detail=f"the trace has no step marks: {how}")
    elif not steps.cycles_ns:
        yield Note(
            id="no-cycle",
            detail="fewer than two steps with device work of their own: the budget covers the "
            "whole window",
        )


# One trace file, explained where it is read: in this process, in a worker, or elsewhere.
#
# Only the result is kept of a rank, so it is small: no columns of gaps, and truncated tables when
# there are many ranks.

_R = TypeVar("_R")
# Called with a rank while its trace is in memory.
Visit = Callable[[RankAnalysis, RankExplanation], _R]


class ExplainedFile(NamedTuple, Generic[_R]):
    """A rank, and the result of the visit; a memory snapshot has no trace to visit."""

    rank: RankExplanation
    results: tuple[_R, ...] = ()


def explain_file(
    file: TraceFile,
    visit: Visit[_R] | None = None,
    *,
    options: ReadOptions = AS_USUAL,
    max_rows: int | None = None,
    progress: Progress | None = None,
) -> ExplainedFile[_R]:
    """Read and explain a file, then visit it. Raises UnreadableInputError."""
    try:
        with on_disk(file) as path:
            if is_pickle(read_head(path)):
                from stepscope.explain.rank_without_steps import explain_snapshot

                return ExplainedFile(explain_snapshot(path, str(file), options.memory_limit))
            if is_server_file(path):
                from stepscope.explain.rank_without_steps import explain_server

                return ExplainedFile(explain_server(path, str(file)))
            inputs = read_rank_inputs(path, options, name=str(file), progress=progress)
            analysis = RankAnalysis(inputs)
            rank = explain_analysis(analysis)
    except MemoryError:
        raise UnreadableInputError(f"{file}: there is not enough memory to read it") from None
    results = (visit(analysis, rank),) if visit else ()
    rank = replace(rank, gaps=None)
    return ExplainedFile(rank if max_rows is None else truncate_tables(rank, max_rows), results)


def try_explain_file(
    file: TraceFile, *, visit: Visit[_R] | None, options: ReadOptions, max_rows: int | None = None
) -> ExplainedFile[_R] | Exception:
    """As `explain_file`, but returns the error, so that one bad file does not stop the others."""
    try:
        return explain_file(file, visit, options=options, max_rows=max_rows)
    except UnreadableInputError as error:
        return error
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG"):
            raise
        return StepscopeError(
            f"{file}: a defect in stepscope: {type(error).__name__}: {error}; "
            "set STEPSCOPE_DEBUG=1 to see where"
        )


# One rank's memory, from the best source there is, with theory and the largest batch.

POOLS_NOT_RECORDED = (
    "CUDA graphs ran, and the trace does not show what their private pools hold. So the peak is a "
    "lower bound; fragmentation and the largest batch are not known (record with `stepscope run`)"
)

_HIDDEN = (
    "save_memory holds what is saved for backward: it is in its plan, not among the activations, "
    "and the largest batch is not known"
)


def explain_memory(analysis: RankAnalysis) -> Memory | None:
    """None where neither a capture nor the trace recorded memory."""
    trace, inputs = analysis.trace, analysis.inputs.memory
    captured = inputs.captured if inputs.captured and is_account(inputs.captured) else None
    if captured is None and not len(trace.memory):
        return None
    from stepscope.explain.memory.traced import memory_of_trace

    traced = memory_of_trace(trace, analysis.steps)
    calls = analysis.forward_calls if captured is not None or traced is not None else None
    cast_bytes = calls.cast_bytes if calls else 0
    if captured is not None:
        memory = memory_of_capture(captured)
        lines = capture_lines(captured, cast_bytes)
        if traced is not None:
            memory = replace(
                memory,
                timeline=traced.memory.timeline,
                by_site=traced.memory.by_site,
                growth=traced.memory.growth or memory.growth,
            )
    elif traced is not None:
        memory, lines = traced.memory, traced.lines(cast_bytes)
        if has_graphs(trace):
            memory = replace(memory, fragmentation=None, notes=(*memory.notes, POOLS_NOT_RECORDED))
            lines = ()
    else:
        return None
    limit, limit_from = _limit(trace, memory, inputs)
    memory = replace(
        memory,
        growth=growth_of_steps(inputs.step_bytes) or memory.growth,
        limit_bytes=limit,
        saving=inputs.saving,
        theory=_theory(memory, captured, calls, analysis.strategies),
    )
    if inputs.saving is not None:
        return replace(memory, notes=(*memory.notes, _HIDDEN))
    in_pools = captured.pools_unknown_bytes or 0 if captured is not None else 0
    if in_pools and not is_known_to_grow(lines, in_pools):
        return replace(memory, notes=(*memory.notes, UNKNOWN_POOLS))
    if not any(line.scaling_bytes for line in lines):
        largest_batch = None
    else:
        batch = read_batch(analysis)
        used = memory.peak_bytes / memory.reserved_bytes if memory.reserved_bytes else 0.0
        largest_batch = find_largest(
            lines,
            batch=batch.sure if batch else None,
            batch_from=batch.read_from if batch and batch.sure else None,
            batches_per_step=batch.per_step if batch else None,
            limit_bytes=memory.limit_bytes,
            limit_from=limit_from,
            held_back=max(0.0, 1 - used) if used else 0.0,
        )
    return replace(memory, largest_batch=largest_batch)


def _limit(
    trace: Trace, memory: Memory, inputs: MemoryInputs
) -> tuple[int | None, LimitFrom | None]:
    """The given limit, else the device's memory; a trace does not record that of a CPU."""
    if inputs.limit_bytes is not None:
        return inputs.limit_bytes, "given"
    if memory.device == "cpu":
        return None, None
    used = set(trace.device.device.tolist()) or {0}
    sizes = [device.memory_bytes for device in trace.devices if device.id in used]
    limit = min((size for size in sizes if size > 0), default=None)
    return limit, "device" if limit else None


def _theory(
    memory: Memory,
    captured: CapturedMemory | None,
    calls: StepCalls | None,
    strategies: Iterable[RankStrategy],
) -> Theory | None:
    """Only for a model whose parameters are known, in a step that trains it."""
    largest = captured.categories if captured else memory.categories
    parameters, gradients, optimizer = (
        largest.get(name) for name in ("parameters", "gradients", "optimizer")
    )
    if not captured and gradients is not None:
        gradients = parameters  # at a trace's peak they may just have been released
    if not parameters or gradients is None or optimizer is None:
        return None
    model = find_transformer(calls) if calls else None
    measured = largest.get("activations")
    return make_theory(
        (parameters, gradients, optimizer),
        sharding=_sharding(strategies),
        activations=transformer_activations(model, measured) if model and measured else None,
    )


def _sharding(strategies: Iterable[RankStrategy]) -> tuple[int, int] | None:
    for strategy in strategies:
        if isinstance(strategy, RankFullySharded) and strategy.groups and strategy.groups[0].size:
            return strategy.stage, strategy.groups[0].size
    return None


# Cut a rank's tables to their longest rows: the full tables of very many ranks are too large.
#
# Rows called OTHERS hold the sums of what was cut, so that every column still adds up.

OTHERS = "(others)"
_MAX_SPOTS = 20  # fewer than other rows: a spot has many fields
_MERGED_BY = {"min_ns": min, "max_ns": max}  # all other columns are summed


class _Table(NamedTuple):
    """How the rows of a table become one: every field is a label or a column, or is alike."""

    labels: dict[str, Any]
    columns: str
    alike: Callable[[Any], object] = lambda _: None  # rows that differ in this stay apart


_TABLES = {
    "kernels": _Table(
        {"name": OTHERS},
        "count total_ns min_ns max_ns steps_count steps_ns",
        lambda row: row.kind,  # it decides what the time counts as
    ),
    "operators": _Table(
        {"name": OTHERS, "shapes": "", "dtypes": ""},
        "calls host_total_ns host_self_ns device_total_ns device_self_ns",
    ),
    "modules": _Table(
        {"name": OTHERS}, "calls host_total_ns host_self_ns forward_device_ns backward_device_ns"
    ),
    "lines": _Table(
        {"file": OTHERS, "line": -1, "function": ""}, "calls host_total_ns host_self_ns device_ns"
    ),
    "syncs": _Table({"name": OTHERS, "operator": "", "file": None, "line": None}, "count total_ns"),
    "collectives": _Table(  # sizes differ, so there is no one bandwidth
        dict.fromkeys(("size_bytes", "algbw_gb_s", "busbw_gb_s")),
        "count total_ns exposed_ns",
        lambda row: (row.kind, row.group, row.group_size),
    ),
}
_SPOTS = _Table(
    {"operator": OTHERS, "shapes": "", "dtype": "", "phase": "other"}
    | dict.fromkeys(("intensity", "achieved_flops", "ceiling_flops")),
    "calls device_ns flops bytes_moved roof_ns gap_ns",
    lambda row: (row.recomputed, row.bound, bool(row.flops)),
)
_REGIONS = _Table(
    {"key": OTHERS, "region": None, "flops": None, "not_graphed": None}
    | dict.fromkeys(("lines", "kernel_times", "unfused"), ()),
    "calls ms kernels gaps_ms",
    lambda row: (row.backward, row.captured),
)
_MODULE_BYTES = _Table({"module": OTHERS}, "size_bytes tensors")
_SITE_BYTES = _Table(
    {"operator": OTHERS, "function": ""} | dict.fromkeys(("category", "file", "line")),
    "size_bytes blocks",
)


def truncate_tables(rank: RankExplanation, max_rows: int) -> RankExplanation:
    """Keep the first `max_rows` rows of each table, and the sums of those left out."""
    tables = {name: _cut(getattr(rank, name), max_rows, how) for name, how in _TABLES.items()}
    tables["kernels"] = tuple(sorted(tables["kernels"], key=lambda row: -row.total_ns))
    efficiency, memory = rank.efficiency, rank.memory
    if efficiency is not None:
        spots = _cut(efficiency.spots, min(max_rows, _MAX_SPOTS), _SPOTS)
        efficiency = replace(efficiency, spots=spots)
    if memory is not None:
        memory = replace(
            memory,
            by_module=_cut(memory.by_module, max_rows, _MODULE_BYTES),
            by_site=_cut(memory.by_site, max_rows, _SITE_BYTES),
            timeline=None,
        )
    compiled = rank.compiled and _cut_compiled(rank.compiled, max_rows)
    return replace(rank, efficiency=efficiency, memory=memory, compiled=compiled, **tables)


def _cut_compiled(compiled: CompiledWork, max_rows: int) -> CompiledWork:
    """The rest is summed: one more graph without lines."""
    regions = _cut(compiled.regions, min(max_rows, _MAX_SPOTS), _REGIONS)
    return replace(compiled, regions=regions, breaks=compiled.breaks[:max_rows])


def _cut(rows: tuple[Any, ...], max_rows: int, table: _Table) -> tuple[Any, ...]:
    left_out: dict[object, list[Any]] = {}
    for row in rows[max_rows:]:
        left_out.setdefault(table.alike(row), []).append(row)
    return (*rows[:max_rows], *(_merge(alike, table) for alike in left_out.values()))


def _merge(rows: list[Any], table: _Table) -> Any:
    columns = {name: _merge_column(rows, name) for name in table.columns.split()}
    return replace(rows[0], **table.labels, **columns)


def _merge_column(rows: list[Any], name: str) -> Any:
    """None where one of the values is not known."""
    values = [getattr(row, name) for row in rows]
    return None if None in values else _MERGED_BY.get(name, sum)(values)


# Whether the recorded steps had inputs like those of the run.

_LEAST_DIFFERENCE = 1.25  # times as many elements, or as few


def note_other_inputs(steps: StepColumns | None, run: RankRun | None) -> tuple[Note, ...]:
    """The window shows which operators a step consists of. Where inputs decide how long steps take,
    and the window's are smaller or larger than the run's, so are its operators."""
    if steps is None or steps.elements is None or run is None or run.inputs is None:
        return ()
    known = steps.elements > 0
    recorded, others = steps.elements[known & steps.window], steps.elements[known & ~steps.window]
    if not len(recorded) or not len(others[run.warm_up :]):
        return ()
    inside, outside = float(np.mean(recorded)), float(np.mean(others[run.warm_up :]))
    if max(inside / outside, outside / inside) < _LEAST_DIFFERENCE:
        return ()
    detail = (
        f"the recorded steps have {factor(inside / outside)} times as many elements in a batch as "
        f"the run's mean step ({round(inside):,} and {round(outside):,}). Its operators may take "
        "other shares than shown: record other steps (`stepscope run --wait N`, or --every N)"
    )
    return (Note(id="other-inputs", detail=detail),)
