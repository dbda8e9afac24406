"""Apply what-ifs to a recorded step and predict its time with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.errors import UsageError
from stepscope.explain.batch import read_batch
from stepscope.explain.cpu_use import measure_cpu_use
from stepscope.explain.incomplete_ranks import refuse_span
from stepscope.explain.whole_run.stalls import find_stalled
from stepscope.predict.declaration import NothingToChange, Outcome, Refused, WrongValue
from stepscope.predict.fitted import fitted
from stepscope.predict.stalls import describe_stalls, find_stalls, with_longer_steps
from stepscope.predict.step_context import StepContext, find_parameters, find_rule
from stepscope.predict.whatifs import find_prediction, in_order, predict_change
from stepscope.records.hardware import find_device
from stepscope.records.job import Job
from stepscope.records.memory import Memory
from stepscope.records.normal import NORMAL_95
from stepscope.records.prediction import (
    PeakMemory,
    Prediction,
    Setting,
)
from stepscope.records.run import RankRun
from stepscope.step.correct import Corrected, as_recorded, correct, scale_host
from stepscope.step.graph import describe
from stepscope.step.replay import step_ns

if TYPE_CHECKING:
    from stepscope.explain.rank_analysis import RankAnalysis

# A trace and some what-ifs -> a prediction with an interval.
#
# The step of record is the mean of the run's steady steps. What-ifs change the typical step, which
# the trace shows, scaled to the typical step of the run; the run's stalls come on top (stalls.py).

# Of the logarithm of a change: twice the change has about twice the error.
CHANGE_DOUBT = fitted("doubts.change")
# A host busy for less than this share of the step is hidden; its time is known worse.
_HIDDEN_HOST, _HIDDEN_DOUBT = 0.9, fitted("doubts.hidden_host")
SMALLEST_DOUBT = fitted("doubts.smallest")  # no step is known better than this
JOINED = "joined"  # changes of the peak that are worked out together
_MOST_STEPS = 10_000  # that show how much steps differ


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    context: StepContext
    step_ns: float  # of the typical step: stalls are in the context
    samples: float = 1.0
    variance: float = 0.0
    peak: PeakMemory | None = None
    peak_changes: frozenset[str] = frozenset()  # the names of what-ifs that change the peak
    assumptions: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    pointless: tuple[Setting, ...] = ()  # refused because the step has nothing to change
    applied: tuple[Setting, ...] = ()


class Bench:
    """A step that changes can be tried on. It is read and corrected once."""

    def __init__(
        self, analysis: RankAnalysis, *, memory: Memory | None = None, job: Job | None = None
    ) -> None:
        refuse_span(analysis)
        trace, work, steps = analysis.trace, analysis.work, analysis.steps
        measured = analysis.measured
        self.run = analysis.run if measured else None
        self.profiled_ns = step_ns(analysis.typical.graph)
        # As `explain` shows it: measured, else without the profiler's cost, else as recorded.
        traced = analysis.typical.graph
        if measured is not None:
            corrected = correct(traced, trace, truth=measured, slowness=analysis.slowness)
        else:
            recorded_ns = 1e6 * (analysis.profiled_ms or 0.0)
            corrected = analysis.corrected or as_recorded(traced, trace, recorded_ns)
        graph = describe(trace, work, corrected.graph)
        self.corrected: Corrected = replace(corrected, graph=graph)
        device = find_device(trace.device_name or "")
        reading = read_batch(analysis)
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
            batch=reading.sure if reading else None,
            batch_reading=reading,
            multiprocessors=device.multiprocessors if device else 108,
            profiles=analysis.inputs.calibrations,
            cpu=analysis.compute_once(measure_cpu_use),
            job=job,
            steps_ns=_calm_steps(self.run, measured.steps_ns if measured else steps.cycles_ns),
            stalls=with_longer_steps(find_stalls(self.run), analysis),
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
        """The low end of the present typical step's interval, over the step."""
        base = self.corrected
        typical = replace(self.context, stalls=None)
        return _interval(typical, base, base.step_ns, 0.0)[0] / base.step_ns

    @property
    def mean_ns(self) -> float:
        """The step of record: the typical step and the run's stalls."""
        return self.corrected.step_ns + self.context.stalls_ns

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
            outcome = predict_change(setting.name, trial.context, setting.value)
        except WrongValue as reason:
            raise UsageError(str(reason)) from None
        except Refused as reason:
            # The change comes before its reason, unless the reason names it.
            named = str(reason).startswith(setting.name)
            pointless = (setting,) if isinstance(reason, NothingToChange) else ()
            return replace(
                trial,
                refused=(*trial.refused, str(reason) if named else f"{setting}: {reason}"),
                pointless=(*trial.pointless, *pointless),
            )
        after = step_ns(outcome.context.graph)
        if after <= outcome.context.graph.end_ns:
            refusal = f"{setting}: nothing of the step would be left"
            return replace(trial, refused=(*trial.refused, refusal))
        change = abs(math.log(max(after, 1.0) / max(trial.step_ns * outcome.repeats, 1.0)))
        variance = (outcome.spread * min(1.0, change)) ** 2 + (CHANGE_DOUBT * change) ** 2
        variance = outcome.doubt**2 + (0.0 if outcome.doubt_is_whole else variance)
        return Trial(
            context=_change_stalls(trial, outcome, after),
            step_ns=after,
            samples=trial.samples * outcome.samples,
            variance=trial.variance + variance,
            peak=outcome.peak if _peak_changes(setting) else trial.peak,
            peak_changes=trial.peak_changes | _peak_changes(setting),
            assumptions=(*trial.assumptions, *outcome.assumptions),
            refused=trial.refused,
            pointless=trial.pointless,
            applied=(*trial.applied, setting),
        )

    def conclude(self, trial: Trial, settings: Sequence[Setting]) -> Prediction:
        context, base, memory = trial.context, self.corrected, self.context.memory
        predicted = trial.step_ns + context.stalls_ns
        low, high = _interval(context, base, trial.step_ns, trial.variance)
        least = context.exchange.least_ns * self.lowest if context.exchange else 0.0
        if least < trial.step_ns:  # links only add to a worker's own time
            low = max(low, least + (context.stalls.least_ns if context.stalls else 0.0))
        speedup = self.mean_ns / predicted if predicted else 1.0
        half = _half_of_speedup(self.context, trial, base)
        # That of the run's mean step if it is known, else of the corrected step.
        baseline_low, baseline_high = base.low_ns, base.high_ns
        if self.run is not None and self.run.times is not None:
            baseline_low = min(1e6 * self.run.times.low_ms, self.mean_ns)
            baseline_high = max(1e6 * self.run.times.high_ms, self.mean_ns)
        # Two changes of the peak that were not worked out together: how they act is not known.
        peak = trial.peak if len(trial.peak_changes) == 1 else None
        if not trial.peak_changes:
            peak = self.peak_now
        # Several what-ifs plan the exchange together; it is described once.
        said = [*trial.assumptions]
        if context.exchange:
            peak = peak.plus(context.exchange.held_bytes) if peak else None
            said += filter(None, [context.exchange.summary])
        # What was priced with ceilings that may be too low.
        priced = any(find_prediction(setting.name).needs_ceilings for setting in trial.applied)
        said += filter(None, [context.ceilings.doubt if priced and context.ceilings else ""])
        said += describe_stalls(context.stalls) if trial.applied else ()
        consistency = context.consistency
        if consistency is not None:  # updates per second, every worker with one per step
            rates = (1e9 * consistency.workers / ns for ns in (predicted, high, low))
            names = ("updates_per_s", "low", "high")
            consistency = replace(
                consistency, **dict(zip(names, rates, strict=True)), step_ms=predicted / 1e6
            )
        return Prediction(
            settings=tuple(settings),
            baseline_ms=self.mean_ns / 1e6,
            baseline_low_ms=baseline_low / 1e6,
            baseline_high_ms=baseline_high / 1e6,
            baseline_from=base.basis,
            profiled_ms=self.profiled_ns / 1e6,
            basis="median" if self.context.stalls is None else "mean",
            baseline_stall_ms=self.context.stalls_ns / 1e6,
            predicted_ms=predicted / 1e6,
            stall_ms=context.stalls_ns / 1e6,
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
            assumptions=tuple(said),
            refused=trial.refused,
            pointless=trial.pointless,
            applied=tuple(setting for setting in settings if setting in trial.applied),
            consistency=consistency,
        )

    def interval_ms(self, context: StepContext, doubt: float) -> tuple[float, float, float]:
        """A changed step with low and high; `doubt` is of its logarithm."""
        typical = step_ns(context.graph)
        if context.stalls is not None:
            stalls = context.stalls.with_step(typical / max(1.0, self.corrected.step_ns))
            context = replace(context, stalls=stalls)
        low, high = _interval(context, self.corrected, typical, doubt**2)
        return (typical + context.stalls_ns) / 1e6, low / 1e6, high / 1e6


def _calm_steps(run: RankRun | None, steps_ns: tuple[int, ...]) -> tuple[int, ...]:
    """Steps without stalls, which are counted on their own."""
    if run is None or run.times is None or not steps_ns:
        return steps_ns
    steps = np.array(steps_ns, np.float64)
    if len(steps) > _MOST_STEPS:
        steps = np.quantile(steps, (np.arange(_MOST_STEPS) + 0.5) / _MOST_STEPS)
    stalled = find_stalled(steps, np.full(len(steps), 1e6 * run.times.typical_ms))
    return tuple(steps[~stalled].astype(np.int64).tolist())


def _change_stalls(trial: Trial, outcome: Outcome, after_ns: float) -> StepContext:
    """Longer steps change as the typical one does, unless the what-if says what becomes of them, or
    plans an exchange with others. What it makes of stalls is as doubtful as what it makes of the
    step."""
    before, context = trial.context, outcome.context
    stalls = context.stalls
    if stalls is None:
        return context
    moved = abs(context.stalls_ns - before.stalls_ns * outcome.repeats)
    if moved and outcome.spread:
        stalls = stalls.plus_doubt(outcome.spread * moved)
    is_planned = context.exchange is not before.exchange
    if before.stalls is None or is_planned:
        return replace(context, stalls=stalls)
    if stalls.unknown_ns == before.stalls.unknown_ns * outcome.repeats:
        stalls = stalls.with_step(after_ns / max(1.0, trial.step_ns * outcome.repeats))
    return replace(context, stalls=stalls)


def _peak_changes(setting: Setting) -> frozenset[str]:
    """What changes peak memory: JOINED, whose last peak counts all, or this what-if by its name."""
    change = find_prediction(setting.name)
    if change.joins_peak or (change.shares_batch and change.shares_batch(setting.value)):
        return frozenset({JOINED})
    return frozenset() if change.keeps_peak else frozenset({setting.name})


def _interval(
    context: StepContext, base: Corrected, typical: float, variance: float
) -> tuple[float, float]:
    """The baseline's doubt as far as the host still decides, plus the what-ifs' own and that of
    the stalls."""
    whole = typical + context.stalls_ns
    share = typical / whole
    doubt = share * _host_doubt(context, base, typical)
    stalls = context.stalls.mean_doubt_ns / whole if context.stalls else 0.0
    variance += base.unexplained**2
    half = NORMAL_95 * math.sqrt(doubt**2 + share**2 * variance + stalls**2 + SMALLEST_DOUBT**2)
    return whole * math.exp(-half), whole * math.exp(half)


def _half_of_speedup(before: StepContext, trial: Trial, base: Corrected) -> float:
    """Half of its interval, as a logarithm. The doubts about the host and about how often steps
    stall are the same before and after, so only their change counts."""
    context = trial.context
    mean, whole = base.step_ns + before.stalls_ns, trial.step_ns + context.stalls_ns
    now = _host_doubt(before, base, base.step_ns) * base.step_ns / mean
    then = _host_doubt(context, base, trial.step_ns) * trial.step_ns / whole
    variance = trial.variance * (trial.step_ns / whole) ** 2
    if stalls := context.stalls:
        variance += (stalls.deviation_ns * (1 / mean - stalls.left / whole)) ** 2
        variance += (stalls.doubt_ns / whole) ** 2
    return NORMAL_95 * math.sqrt((now - then) ** 2 + variance + SMALLEST_DOUBT**2)


def _host_doubt(context: StepContext, base: Corrected, step: float) -> float:
    """How much longer the step would be with a slower host. Where the host waits for the device in
    the middle of a step, its time shows although it is busy for a small part of the step only."""
    if not step:
        return 0.0
    spread = host_spread(base)
    by_share = spread * min(1.0, max(0.0, context.graph.host_ns / step)) ** 4
    if context.exchange is not None:  # with links in the step, the grid of workers has this alone
        return by_share
    slower = step_ns(scale_host(context.graph, math.exp(spread)))
    return max(by_share, math.log(max(1.0, slower / step)))


def host_spread(base: Corrected) -> float:
    """The doubt about the host's time.

    A step that the device decides does not show how fast its host is, unless the run has steps
    whose host ran ahead.
    """
    hidden = base.graph.host_ns < _HIDDEN_HOST * base.step_ns and not base.host_measured
    return math.hypot(base.spread, _HIDDEN_DOUBT if hidden else 0.0)
