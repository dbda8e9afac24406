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

# Of the logarithm of a change: twice the change has about twice the error.
CHANGE_DOUBT = 0.08
# A host busy for less than this share of the step is hidden; its time is known this much worse.
_HIDDEN_HOST, _HIDDEN_DOUBT = 0.9, 0.1
SMALLEST_DOUBT = 0.01  # no step is known better than this


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    context: StepContext
    step_ns: float
    samples: float = 1.0
    variance: float = 0.0
    peak: PeakMemory | None = None
    peak_changes: frozenset[str] = frozenset()  # the names of what-ifs that change the peak
    assumptions: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    applied: tuple[Setting, ...] = ()


class Bench:
    """A step that changes can be tried on. It is read and corrected once."""

    def __init__(
        self, analysis: RankAnalysis, *, memory: Memory | None = None, job: Job | None = None
    ) -> None:
        trace, work, steps = analysis.trace, analysis.work, analysis.steps
        measured = analysis.measured
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
        """Measured, else by arithmetic."""
        from stepscope.predict.peaks import peak_at_batch

        memory = self.context.memory
        if memory is None:
            return peak_at_batch(self.context, 1.0)
        return PeakMemory(**dict.fromkeys(PeakMemory.__struct_fields__, memory.peak_bytes))

    @cached_property
    def lowest(self) -> float:
        """The low end of the present step's interval, over the step."""
        base = self.corrected
        return _interval(self.context, base, base.step_ns, 0.0)[0] / base.step_ns

    def predict(self, settings: Sequence[Setting]) -> Prediction:
        """All changes together; one that refuses leaves the step as it is."""
        trial = self.begin()
        for setting in in_order(settings):
            trial = self.change(trial, setting)
        return self.conclude(trial, settings)

    def begin(self) -> Trial:
        return Trial(context=self.context, step_ns=self.corrected.step_ns)

    def change(self, trial: Trial, setting: Setting) -> Trial:
        """Make one more change; callers keep to `in_order`."""
        try:
            outcome = find_whatif(setting.name).apply(trial.context, setting.value)
        except WrongValue as reason:
            raise UsageError(str(reason)) from None
        except Refused as reason:
            return replace(trial, refused=(*trial.refused, _name_setting(setting, str(reason))))
        after = step_ns(outcome.context.graph)
        if after <= 0:
            refusal = f"{setting}: nothing of the step would be left"
            return replace(trial, refused=(*trial.refused, refusal))
        change = abs(math.log(max(after, 1.0) / max(trial.step_ns * outcome.repeats, 1.0)))
        variance = (outcome.spread * min(1.0, change)) ** 2 + (CHANGE_DOUBT * change) ** 2
        variance += outcome.doubt**2
        return Trial(
            context=outcome.context,
            step_ns=after,
            samples=trial.samples * outcome.samples,
            variance=trial.variance + variance,
            peak=outcome.peak or trial.peak,
            peak_changes=trial.peak_changes | _peak_changes(setting),
            assumptions=(*trial.assumptions, *outcome.assumptions),
            refused=trial.refused,
            applied=(*trial.applied, setting),
        )

    def conclude(self, trial: Trial, settings: Sequence[Setting]) -> Prediction:
        context, base, memory = trial.context, self.corrected, self.context.memory
        predicted = trial.step_ns
        low, high = _interval(context, base, predicted, trial.variance)
        least = context.exchange.least_ns * self.lowest if context.exchange else 0.0
        if least < predicted:  # links only add to a worker's own time
            low = max(low, least)
        speedup = base.step_ns / predicted if predicted else 1.0
        half = _half_of_speedup(self.context, trial, base)
        # How two changes of the peak act together is not known.
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
            assumptions=(*trial.assumptions, *_exchange_summary(context), *_ceilings_doubt(trial)),
            refused=trial.refused,
            applied=tuple(setting for setting in settings if setting in trial.applied),
        )


def _step_of_record(analysis: RankAnalysis) -> Corrected:
    """As `explain` shows it: measured, else without the profiler's cost, else as recorded."""
    graph, measured = analysis.typical.graph, analysis.measured
    if measured is not None:
        return correct(graph, analysis.trace, truth=measured, slowness=analysis.slowness)
    return analysis.corrected or as_recorded(
        graph, analysis.trace, 1e6 * (analysis.profiled_ms or 0.0)
    )


def _peak_changes(setting: Setting) -> frozenset[str]:
    """What changes peak memory: the batch, or this what-if by its name."""
    whatif = find_whatif(setting.name)
    if whatif.shares_batch and whatif.shares_batch(setting.value):
        return frozenset({"batch"})
    return frozenset() if whatif.keeps_peak else frozenset({setting.name})


def _exchange_summary(context: StepContext) -> tuple[str, ...]:
    """Several what-ifs plan the exchange together; it is described once."""
    return (context.exchange.summary,) if context.exchange and context.exchange.summary else ()


def _ceilings_doubt(trial: Trial) -> tuple[str, ...]:
    """A note if the prediction was priced with ceilings that may be too low."""
    ceilings = trial.context.ceilings
    doubt = ceilings.doubt if ceilings else ""
    priced = any(find_whatif(setting.name).needs_ceilings for setting in trial.applied)
    return (doubt,) if doubt and priced else ()


def _batch(calls: StepCalls | None) -> int | None:
    batch = find_batch(calls) if calls else None
    return batch[0] if batch else None


def _name_setting(setting: Setting, reason: str) -> str:
    """Put the change before its reason, unless the reason names it."""
    return reason if reason.startswith(setting.name) else f"{setting}: {reason}"


def _interval(
    context: StepContext, base: Corrected, predicted: float, variance: float
) -> tuple[float, float]:
    """The baseline's doubt as far as the host still decides, plus the what-ifs' own."""
    doubt = _host_doubt(context, base, predicted)
    half = 1.96 * math.sqrt(doubt**2 + variance + SMALLEST_DOUBT**2)
    return predicted * math.exp(-half), predicted * math.exp(half)


def _half_of_speedup(before: StepContext, trial: Trial, base: Corrected) -> float:
    """Half of its interval, as a logarithm. The doubt about the host is the same before and after,
    so only its change counts."""
    now = _host_doubt(before, base, base.step_ns)
    then = _host_doubt(trial.context, base, trial.step_ns)
    return 1.96 * math.sqrt((now - then) ** 2 + trial.variance + SMALLEST_DOUBT**2)


def _host_doubt(context: StepContext, base: Corrected, step: float) -> float:
    if not step:
        return 0.0
    return host_spread(base) * min(1.0, max(0.0, context.graph.host_ns / step)) ** 4


def host_spread(base: Corrected) -> float:
    """The doubt about the host's time.

    A step that the device decides does not show how fast its host is, unless the run has steps
    whose host ran ahead.
    """
    hidden = base.graph.host_ns < _HIDDEN_HOST * base.step_ns and not base.host_measured
    return math.hypot(base.spread, _HIDDEN_DOUBT if hidden else 0.0)
