"""One rank's analysis, which explaining the rank and predicting its step share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from msgspec.structs import replace

from stepscope.errors import NotCapturedError
from stepscope.explain.flops.costs import Chosen, Costs, Pieces, choose, count_costs, cut
from stepscope.explain.job.rank_part import measure_rank_steps
from stepscope.explain.memory.model import StepCalls, read_calls
from stepscope.explain.strategies import find_strategies
from stepscope.records.explanation import Steps, Timeline
from stepscope.records.hardware import Ceilings, DeviceSpec, PeakSource, Profile, find_device
from stepscope.records.job import CollectiveCalls, RankSteps
from stepscope.records.rank import MeasuredSteps, RankInputs
from stepscope.records.run import RankRun
from stepscope.records.strategies import RankStrategy
from stepscope.records.trace import Trace
from stepscope.step.arrays import Int32s
from stepscope.step.collectives import list_calls
from stepscope.step.correct import Corrected, correct, find_slowness
from stepscope.step.cuda_graphs import add_recordings, is_of_graphs
from stepscope.step.graph import CallKind, Typical, typical_step
from stepscope.step.steps import find_steps
from stepscope.step.timeline import HostTime, divide, step_time, watch_host
from stepscope.step.work import Work, find_work

_T = TypeVar("_T")


class RankAnalysis:
    """Each part is computed when it is first asked for, and only once."""

    def __init__(self, inputs: RankInputs) -> None:
        self.inputs = inputs
        self.trace, self.recordings = add_recordings(inputs.trace, inputs.captures)
        self._results: dict[Callable[[RankAnalysis], Any], Any] = {}

    def compute_once(self, function: Callable[[RankAnalysis], _T]) -> _T:
        """The function's result for this analysis; for modules that import this one."""
        if function not in self._results:
            self._results[function] = function(self)
        result: _T = self._results[function]
        return result

    @cached_property
    def work(self) -> Work:
        return find_work(self.trace)

    @cached_property
    def steps(self) -> Steps:
        return find_steps(self.trace, self.work)

    @cached_property
    def timeline(self) -> Timeline:
        """Of the whole trace."""
        return divide(self.work)

    @cached_property
    def host_time(self) -> HostTime:
        return watch_host(self.trace, self.work)

    @cached_property
    def run(self) -> RankRun | None:
        """Every step of the rank; None for a bare trace."""
        if self.inputs.steps is None:
            return None
        from stepscope.explain.whole_run.rank_run import explain_run

        run = explain_run(self.inputs.steps, rank=self.trace.rank or 0, times=self.inputs.times)
        run = replace(run, loader=self.inputs.loader)
        if self.inputs.samples is None:
            return run
        from stepscope.explain.whole_run.outside_model import (
            find_own_python,
            name_time_without_gradients,
            name_unknown_stalls,
        )
        from stepscope.explain.whole_run.stall_stacks import add_stall_stacks

        samples = self.inputs.samples
        run = name_unknown_stalls(add_stall_stacks(run, samples), samples)
        own = find_own_python(samples, run.series) if run.series else None
        run = replace(run, own_python=own)
        return name_time_without_gradients(run, samples, self.inputs.steps)

    @cached_property
    def measured(self) -> MeasuredSteps | None:
        """The typical step without the profiler."""
        if self.run is None or self.inputs.steps is None:
            return self.inputs.measured
        from stepscope.explain.whole_run.rank_run import measure_typical_step

        measured = measure_typical_step(self.inputs.steps, self.run)
        own_ns = self.host_phases_ns
        return replace(measured, host_ns=own_ns) if measured and own_ns else measured

    @cached_property
    def host_phases_ns(self) -> dict[str, int]:
        """The host's own time by phase, as the run measured it; empty if it did not."""
        from stepscope.explain.whole_run.rank_run import host_phases_ns

        launches = self._launches_without_waits
        return host_phases_ns(self.inputs.host_steps, self.inputs.steps, launches)

    @property
    def _launches_without_waits(self) -> int | None:
        """Of a typical step; None if it waits for the device itself, or the trace shows none."""
        try:
            kinds = self.typical.graph.calls.kind
        except NotCapturedError:
            return None
        return None if (kinds == CallKind.WAIT).any() else int((kinds == CallKind.LAUNCH).sum())

    @cached_property
    def profiled_ms(self) -> float | None:
        """The step as it was recorded."""
        return step_time(self.steps, self.timeline)

    @cached_property
    def costs(self) -> Costs:
        graphs = self.inputs.compiler.graphs if self.inputs.compiler else ()
        return count_costs(self.trace, self.work, self.steps, graphs, self.recordings)

    @cached_property
    def steady_steps(self) -> Chosen:
        """The steps that amounts per step are averaged over."""
        return choose(self.steps)

    @cached_property
    def pieces(self) -> Pieces:
        """The device's work in the steady steps."""
        return cut(self.trace, self.work, self.costs, self.steady_steps)

    @cached_property
    def ceilings(self) -> Ceilings | None:
        """The rates that the device can reach."""
        return find_ceilings(self.trace, self.inputs.profile)

    @cached_property
    def forward_calls(self) -> StepCalls | None:
        """Operators of a step's forward pass, which show the batch and the model."""
        return read_calls(self.trace, self.steps)

    @cached_property
    def collective_calls(self) -> tuple[CollectiveCalls, Int32s]:
        """The calls in order of arrival, and the host event that made each."""
        return list_calls(self.trace, self.work, self.steps, self.inputs.folder)

    @cached_property
    def rank_steps(self) -> RankSteps:
        return measure_rank_steps(self.trace, self.work, self.steps)

    @cached_property
    def strategies(self) -> tuple[RankStrategy, ...]:
        calls, rows = self.collective_calls
        recorded = self.inputs.folder, self.inputs.memory.captured
        return find_strategies(self.trace, self.work, calls, rows, self.rank_steps, *recorded)

    @cached_property
    def slowness(self) -> float | None:
        """How much recording slowed the host; None when the trace does not show it."""
        return find_slowness(self.trace)

    @cached_property
    def typical(self) -> Typical:
        """Raises NotCapturedError for a trace without work. `replay.build.describe` adds the
        operators of its calls."""
        return typical_step(self.trace, self.work, self.steps, described=False)

    @cached_property
    def corrected(self) -> Corrected | None:
        """The typical step without the profiler's cost, by the calibrated constants.

        None when the trace has no steady steps, when nothing shows how much recording slowed them,
        and when the result is not shorter than the recorded step. Steps of CUDA graphs need not
        show it.
        """
        if not self.steps.cycles_ns:
            return None
        try:
            if self.slowness is None and not is_of_graphs(self.typical.graph, self.trace):
                return None
            step = correct(self.typical.graph, self.trace, slowness=self.slowness)
        except NotCapturedError:
            return None
        return step if 0 < step.step_ns < 1e6 * (self.profiled_ms or 0.0) else None


_known_device = lru_cache(maxsize=64)(find_device)  # most ranks of a job have the same device


def find_ceilings(trace: Trace, profile: Profile | None) -> Ceilings | None:
    """As calibrated, else from the data sheet; None where neither knows the device."""
    spec = _spec(trace)
    flops: dict[str, float] = dict(spec.peaks) if spec else {}
    flops_source: dict[str, PeakSource] = dict.fromkeys(flops, "table")
    bytes_s = spec.bandwidth_bytes_s if spec else None
    bytes_source: PeakSource | None = "table" if spec else None
    source = [spec.source] if spec else []
    if profile:
        flops |= profile.matmul_flops
        flops_source |= dict.fromkeys(profile.matmul_flops, "calibrated")
        if profile.copy_bytes_s:
            bytes_s, bytes_source = profile.copy_bytes_s, "calibrated"
        source = [f"measured by stepscope calibrate on {profile.host}", *source]
    if not flops and bytes_s is None:
        return None
    return Ceilings(
        device=trace.device_name or (profile.device if profile else "") or trace.kind,
        flops=flops,
        bytes_s=bytes_s,
        flops_source=flops_source,
        bytes_source=bytes_source,
        source="; for the rest: ".join(source),
        threads=profile.threads if profile and profile.kind == "cpu" else None,
        doubt=profile.doubt if profile else "",
    )


def _spec(trace: Trace) -> DeviceSpec | None:
    name = trace.device_name
    if name is None:
        return None
    device = next(device for device in trace.devices if device.name == name)
    memory, multiprocessors = max(device.memory_bytes, 0), max(device.multiprocessors, 0)
    return _known_device(name, memory or None, multiprocessors or None)
