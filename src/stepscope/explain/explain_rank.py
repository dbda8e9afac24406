"""Everything about one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.budget import make_budget
from stepscope.explain.collectives import list_collectives
from stepscope.explain.compiled import explain_compiled
from stepscope.explain.copies import list_copies
from stepscope.explain.cpu_use import measure_cpu_use
from stepscope.explain.device_time import sum_device_time
from stepscope.explain.efficiency import about_peaks, measure_efficiency
from stepscope.explain.explain_memory import explain_memory
from stepscope.explain.findings import find_in_rank
from stepscope.explain.findings.evidence import RankEvidence
from stepscope.explain.graph_replays import replayed_share
from stepscope.explain.idle import split_idle
from stepscope.explain.kernels import list_kernels
from stepscope.explain.launches import describe_launches
from stepscope.explain.longer_work import periodic_work_ns
from stepscope.explain.membership import find_membership
from stepscope.explain.modules import list_modules
from stepscope.explain.operators import list_operators
from stepscope.explain.python_functions import list_lines
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.explain.record_step import (
    budget_of_record,
    with_correction,
    with_host,
    with_measured,
)
from stepscope.explain.replay.graph_launches import has_graphs, note_uncorrected
from stepscope.explain.syncs import list_syncs
from stepscope.explain.timeline import divide
from stepscope.explain.whole_run.recorded_inputs import note_other_inputs
from stepscope.explain.whole_run.run_calls import calls_of_folder
from stepscope.explain.window_kernels import launched_in
from stepscope.records.explanation import RankExplanation, StepTime
from stepscope.records.job import RankPart
from stepscope.records.quality import Note
from stepscope.records.rank_inputs import RankInputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.explain.work import Work
    from stepscope.records.explanation import Steps
    from stepscope.records.job import RankFolder
    from stepscope.records.measured_steps import MeasuredSteps
    from stepscope.records.profile import Profile
    from stepscope.records.trace import Trace


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
