"""A trace and some what-ifs -> a prediction with an interval."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from stepscope.errors import UsageError
from stepscope.explain.cpu_use import measure_cpu_use
from stepscope.explain.memory.model import find_batch
from stepscope.explain.replay.build import describe
from stepscope.explain.replay.overhead import as_recorded, correct
from stepscope.explain.replay.schedule import step_ns
from stepscope.predict.optimizer_updates import find_rule
from stepscope.predict.outcome import Refused, WrongValue
from stepscope.predict.parameters import find_parameters
from stepscope.predict.step_context import StepContext
from stepscope.predict.whatifs import find_whatif, in_order
from stepscope.records.devices import find_device
from stepscope.records.prediction import PeakMemory, Prediction, Setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.memory.model import StepCalls
    from stepscope.explain.rank_analysis import RankAnalysis
    from stepscope.explain.replay.overhead import Corrected
    from stepscope.records.job import Job
    from stepscope.records.memory import Memory

# Of a change twice as large the error is about twice as large.
CHANGE_DOUBT = 0.08
_HIDDEN_HOST, _UNSEEN_HOST = 0.9, 0.1
SMALLEST_DOUBT = 0.01  # nobody knows a step better than this


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A step with some what-ifs made."""

    context: StepContext
    step_ns: float
    samples: float = 1.0
    variance: float = 0.0
    peak: PeakMemory | None = None
    peak_changes: frozenset[str] = frozenset()  # by what: the batch, or a what-if's name
    assumptions: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    applied: tuple[Setting, ...] = ()


class Bench:
    """A step that changes can be tried on, read and corrected once."""

    def __init__(
        self, analysis: RankAnalysis, *, memory: Memory | None = None, job: Job | None = None
    ) -> None:
        trace, work, steps = analysis.trace, analysis.work, analysis.steps
        measured = analysis.inputs.measured
        self.profiled_ns = step_ns(analysis.typical.graph)
        corrected = _step_of_record(analysis)
        graph = describe(trace, work, corrected.graph)
        self.corrected: Corrected = replace(corrected, graph=graph)
        device = find_device(trace.device_name or "")
        context = StepContext(
            analysis=analysis,
            trace=trace,
            work=work,
            steps=steps,
            graph=graph,
            costs=analysis.costs,
            parameters=find_parameters(analysis),
            ceilings=analysis.ceilings,
            memory=memory,
            calls=analysis.forward_calls,
            batch=_batch(analysis.forward_calls),
            multiprocessors=device.multiprocessors if device else 108,
            profiles=analysis.inputs.calibrations,
            cpu=analysis.compute_once(measure_cpu_use),
            job=job,
            steps_ns=measured.steps_ns if measured else steps.cycles_ns,
        )
        self.context = replace(context, rule=find_rule(context))

    @cached_property
    def peak_now(self) -> PeakMemory | None:
        """As measured, else by arithmetic."""
        from stepscope.predict.peaks import peak_at_batch

        memory = self.context.memory
        if memory is None:
            return peak_at_batch(self.context, 1.0)
        return PeakMemory(**dict.fromkeys(PeakMemory.__struct_fields__, memory.peak_bytes))

    @cached_property
    def lowest(self) -> float:
        """The low end of the step as it is, over the step."""
        base = self.corrected
        return _interval(self.context, base, base.step_ns, 0.0)[0] / base.step_ns

    def predict(self, settings: Sequence[Setting]) -> Prediction:
        """All what-ifs together; one that refuses leaves the step as it is."""
        trial = self.begin()
        for setting in in_order(settings):
            trial = self.change(trial, setting)
        return self.tell(trial, settings)

    def begin(self) -> Trial:
        """The step as it is."""
        return Trial(context=self.context, step_ns=self.corrected.step_ns)

    def change(self, trial: Trial, setting: Setting) -> Trial:
        """Make one more change; callers keep to `in_order`."""
        try:
            outcome = find_whatif(setting.name).apply(trial.context, setting.value)
        except WrongValue as reason:
            raise UsageError(str(reason)) from None
        except Refused as reason:
            return replace(trial, refused=(*trial.refused, _told(setting, str(reason))))
        after = step_ns(outcome.context.graph)
        if after <= 0:
            nothing = f"{setting}: nothing of the step would be left"
            return replace(trial, refused=(*trial.refused, nothing))
        moved = abs(math.log(max(after, 1.0) / max(trial.step_ns * outcome.repeats, 1.0)))
        variance = (outcome.spread * min(1.0, moved)) ** 2 + (CHANGE_DOUBT * moved) ** 2
        variance += outcome.doubt**2
        return Trial(
            context=outcome.context,
            step_ns=after,
            samples=trial.samples * outcome.samples,
            variance=trial.variance + variance,
            peak=outcome.peak or trial.peak,
            peak_changes=trial.peak_changes | _moves_peak(setting),
            assumptions=(*trial.assumptions, *outcome.assumptions),
            refused=trial.refused,
            applied=(*trial.applied, setting),
        )

    def tell(self, trial: Trial, settings: Sequence[Setting]) -> Prediction:
        """What came of it."""
        context, base, memory = trial.context, self.corrected, self.context.memory
        predicted = trial.step_ns
        low, high = _interval(context, base, predicted, trial.variance)
        least = context.exchange.least_ns * self.lowest if context.exchange else 0.0
        if least < predicted:  # links only add to what a worker does by itself
            low = max(low, least)
        speedup = base.step_ns / predicted if predicted else 1.0
        half = _half_of_speedup(self.context, trial, base)
        # What two changes of the peak do to each other is not known.
        peak = trial.peak if len(trial.peak_changes) == 1 else None
        if not trial.peak_changes:
            peak = self.peak_now
        if peak and context.exchange:
            peak = peak.plus(context.exchange.held_bytes)
        return Prediction(
            settings=tuple(settings),
            baseline_ms=base.step_ns / 1e6,
            baseline_low_ms=base.low_ns / 1e6,
            baseline_high_ms=base.high_ns / 1e6,
            baseline_from=base.basis,
            profiled_ms=self.profiled_ns / 1e6,
            predicted_ms=predicted / 1e6,
            low_ms=low / 1e6,
            high_ms=high / 1e6,
            host_ms=context.graph.host_ns / 1e6,
            device_ms=context.graph.device_ns / 1e6,
            peak_bytes=peak.size_bytes if peak else None,
            peak_low_bytes=peak.low_bytes if peak else None,
            peak_high_bytes=peak.high_bytes if peak else None,
            baseline_peak_bytes=memory.peak_bytes if memory else None,
            throughput_factor=trial.samples * speedup,
            speedup_low=speedup * math.exp(-half),
            speedup_high=speedup * math.exp(half),
            assumptions=(*trial.assumptions, *_exchanged(context), *_doubted(context, trial)),
            refused=trial.refused,
            applied=tuple(each for each in settings if each in trial.applied),
        )


def _step_of_record(analysis: RankAnalysis) -> Corrected:
    """As `explain` has it: measured, else freed of the profiler's cost, else as recorded."""
    graph, measured = analysis.typical.graph, analysis.inputs.measured
    if measured is not None:
        return correct(graph, analysis.trace, truth=measured, slowness=analysis.slowness)
    return analysis.corrected or as_recorded(
        graph, analysis.trace, 1e6 * (analysis.profiled_ms or 0.0)
    )


def _moves_peak(setting: Setting) -> frozenset[str]:
    """What moves peak memory: the batch, or this what-if by its name."""
    whatif = find_whatif(setting.name)
    if whatif.shares_batch and whatif.shares_batch(setting.value):
        return frozenset({"batch"})
    return frozenset() if whatif.keeps_peak else frozenset({setting.name})


def _exchanged(context: StepContext) -> tuple[str, ...]:
    """Planned by several what-ifs together, told once."""
    return (context.exchange.summary,) if context.exchange and context.exchange.summary else ()


def _doubted(context: StepContext, trial: Trial) -> tuple[str, ...]:
    """That the ceilings a prediction was priced with may be too low."""
    doubt = context.ceilings.doubt if context.ceilings else ""
    priced = any(find_whatif(setting.name).needs_ceilings for setting in trial.applied)
    return (doubt,) if doubt and priced else ()


def _batch(calls: StepCalls | None) -> int | None:
    found = find_batch(calls) if calls else None
    return found[0] if found else None


def _told(setting: Setting, reason: str) -> str:
    """Which change it is that refuses; most say it themselves."""
    return reason if reason.startswith(setting.name) else f"{setting}: {reason}"


def _interval(
    context: StepContext, base: Corrected, predicted: float, variance: float
) -> tuple[float, float]:
    """The baseline's doubt where the host still decides, and the what-ifs' own."""
    doubt = _host_doubt(context, base, predicted)
    half = 1.96 * math.sqrt(doubt**2 + variance + SMALLEST_DOUBT**2)
    return predicted * math.exp(-half), predicted * math.exp(half)


def _half_of_speedup(before: StepContext, trial: Trial, base: Corrected) -> float:
    """As a logarithm. The doubt about the host is one and the same before and after."""
    now, then = (
        _host_doubt(context, base, step)
        for context, step in ((before, base.step_ns), (trial.context, trial.step_ns))
    )
    return 1.96 * math.sqrt((now - then) ** 2 + trial.variance + SMALLEST_DOUBT**2)


def _host_doubt(context: StepContext, base: Corrected, step: float) -> float:
    if not step:
        return 0.0
    return host_spread(base) * min(1.0, max(0.0, context.graph.host_ns / step)) ** 4


def host_spread(base: Corrected) -> float:
    """Of the host's time. A step that the device decides does not show how fast its host is,
    unless the run told that by steps whose host ran ahead."""
    hidden = base.graph.host_ns < _HIDDEN_HOST * base.step_ns and not base.host_measured
    return math.hypot(base.spread, _UNSEEN_HOST if hidden else 0.0)
