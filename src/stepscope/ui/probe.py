"""Times a step's operators one by one, the most expensive first, and keeps the times."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from stepscope.errors import NotCapturedError, UsageError
from stepscope.predict.forward_calls import find_forward_calls
from stepscope.predict.operator_library import LibraryProblemError, save_times
from stepscope.predict.probed_step import parameter_shapes, place_of
from stepscope.predict.value_flow import follow_values
from stepscope.records.operator_times import MODES, OperatorTime, Output, PassTime, cpu_place
from stepscope.records.probe_report import (
    OUT_OF_TIME,
    ProbedOperator,
    ProbeReport,
    UnprobedOperator,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.predict.forward_calls import StepForward
    from stepscope.predict.step_context import StepContext
    from stepscope.records.operator_times import OperatorCall, ProbedDevice
    from stepscope.records.prediction import Setting

    Show = Callable[[str, float], None]

_SHORTEST_S, _LONGEST_S = 0.02, 1.5  # for one call in one mode
_DESCRIBE_S = 5.0
_FIRST_ROUND = 0.8  # of the budget: every call has its turn; then those known least again
_GOOD_SPREAD, _MOST_RETRIES = 0.02, 3


class Prober(Protocol):
    """What times calls: a child process, or a made-up one in tests."""

    def device(self) -> ProbedDevice: ...

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]: ...


def modes_of(settings: Sequence[Setting]) -> tuple[str, ...]:
    """The precisions asked for. UsageError for anything that a probe cannot change."""
    for setting in settings:
        if setting.name != "precision":
            raise UsageError(f"probe --set {setting}: operators are timed by precision=... only")
        if setting.value not in MODES[1:]:
            raise UsageError(f"precision={setting.value}: choose one of {', '.join(MODES[1:])}")
    return tuple(dict.fromkeys(setting.value for setting in settings))


def probe_step(
    context: StepContext,
    modes: Sequence[str],
    prober: Prober,
    *,
    budget_s: float,
    show: Show = lambda *_: None,
    clock: Callable[[], float] = time.monotonic,
) -> ProbeReport:
    """Raises NotCapturedError for a trace without shapes."""
    began = clock()
    forward = find_forward_calls(context)
    if not forward.calls or not forward.item_ns.sum():
        raise NotCapturedError(
            f"{context.trace.path} has no operators with shapes: record_shapes=True records them"
        )
    device = prober.device()
    started = clock()  # a process that loads torch takes its time, which is not the budget's
    work = _Probe(context, forward, ("", *modes), prober)
    work.time_calls(started + budget_s, show, clock)
    place, notes = _place(context, device), list(_elsewhere(context, device))
    saved = 0
    try:
        times = work.times(place, device.software)
        save_times(times)
        saved = len(times)
    except LibraryProblemError as problem:
        notes.append(f"{problem}; the times are not kept")
    return work.report(place, device, saved, tuple(notes), budget_s, clock() - began)


class _Probe:
    def __init__(
        self, context: StepContext, forward: StepForward, modes: Sequence[str], prober: Prober
    ) -> None:
        self._traced_place, self._forward, self._modes = place_of(context), forward, modes
        self._prober = prober
        self._answers: dict[OperatorCall, dict[str, Any]] = {}
        shapes = parameter_shapes(context)
        self._made = [follow_values(forward.calls, shapes, mode, self._describe) for mode in modes]
        self._traced = forward.pass_ns(backward=False) + forward.pass_ns(backward=True)

    def _describe(self, call: OperatorCall) -> Sequence[Output] | None:
        if call not in self._answers:
            request = {"do": "describe", **call.request()}
            self._answers[call] = self._prober.ask(request, _DESCRIBE_S)
        return _outputs(self._answers[call])

    def _groups(self) -> dict[tuple[OperatorCall, ...], list[int]]:
        """Distinct calls: as made in each mode, with the places of the step's calls."""
        groups: dict[tuple[OperatorCall, ...], list[int]] = {}
        for place, made in enumerate(zip(*self._made, strict=True)):
            groups.setdefault(made, []).append(place)
        return groups

    def time_calls(self, ends: float, show: Show, clock: Callable[[], float]) -> None:
        """The most expensive first, each with its share of the time."""
        weights = {made: self._weight(places) for made, places in self._groups().items()}
        total, first_round_s = sum(weights.values()), _FIRST_ROUND * (ends - clock())
        done = 0.0
        for made in sorted(weights, key=lambda made: -weights[made]):
            seconds = first_round_s * weights[made] / total / len(made)
            done += weights[made]
            for call in made:
                if clock() >= ends:
                    return
                if _spread(self._answers[call]) is None:  # else another precision has it too
                    show(call.name, done / total)
                    self._time(call, min(max(seconds, _SHORTEST_S), _LONGEST_S))
        self._refine(weights, ends, clock)

    def _time(self, call: OperatorCall, seconds: float) -> None:
        """An answer that is known better than the one before replaces it."""
        before = self._answers[call]
        if "error" in before:
            return
        answer = self._prober.ask({"do": "time", "seconds": seconds, **call.request()}, seconds)
        had, has = _spread(before), _spread(answer)
        if had is None or (has is not None and has < had):
            self._answers[call] = {**before, **answer}

    def _refine(
        self,
        weights: dict[tuple[OperatorCall, ...], float],
        ends: float,
        clock: Callable[[], float],
    ) -> None:
        """Spend what is left of the budget where a time is least known."""
        again = {call: 0 for made in weights for call in made}
        weight_of = {call: weight for made, weight in weights.items() for call in made}

        def doubt_ns(call: OperatorCall) -> float:
            spread = _spread(self._answers[call]) or 0.0
            return spread * weight_of[call] if spread > _GOOD_SPREAD else 0.0

        while clock() < ends:
            call = max(again, key=doubt_ns)
            if not doubt_ns(call):
                return
            again[call] += 1
            self._time(call, min(_LONGEST_S, max(_SHORTEST_S, ends - clock())))
            if again[call] == _MOST_RETRIES:
                del again[call]
            if not again:
                return

    def _weight(self, places: list[int]) -> float:
        return float(np.sum(self._traced[places]))

    def times(self, place: str, software: str) -> list[OperatorTime]:
        """Also calls that were only described: what they return is needed to follow dtypes."""
        return [
            OperatorTime(
                call=call,
                outputs=outputs,
                forward=_timing(answer, "forward"),
                backward=_timing(answer, "backward"),
                place=place,
                software=software,
                when_unix=time.time(),
            )
            for call, answer in self._answers.items()
            if (outputs := _outputs(answer)) is not None
        ]

    def report(
        self,
        place: str,
        device: ProbedDevice,
        saved: int,
        notes: tuple[str, ...],
        budget_s: float,
        wall_s: float,
    ) -> ProbeReport:
        total = max(float(np.sum(self._traced)), 1.0)
        operators, unprobed = [], []
        shared = same_traced = same_probed = 0.0
        for made, places in self._groups().items():
            answers, weight = [self._answers[call] for call in made], self._weight(places)
            spent = [_spent_ns(answer) for answer in answers]
            count = len(places)
            if all(ns is not None for ns in spent):
                shared += weight
            for mode, answer in zip(self._modes, answers, strict=True):
                if _spent_ns(answer) is None and weight:
                    why = answer.get("error", OUT_OF_TIME)
                    unprobed.append(_unprobed(made[0], mode, weight / total, why))
            if spent[0] is not None:
                same_traced += weight
                same_probed += spent[0] * count
            operators.append(
                ProbedOperator(
                    name=made[0].name,
                    shapes=made[0].shapes,
                    count=count,
                    traced_ms=weight / 1e6,
                    probed_ms=None if spent[0] is None else spent[0] * count / 1e6,
                    modes_ms={
                        mode: ns * count / 1e6
                        for mode, ns in zip(self._modes[1:], spent[1:], strict=True)
                        if ns is not None
                    },
                    spread=_spread(answers[0]),
                )
            )
        return ProbeReport(
            place=place,
            traced_place=self._traced_place,
            software=device.software,
            modes=tuple(self._modes[1:]),
            operators=tuple(sorted(operators, key=lambda row: -row.traced_ms)),
            unprobed=tuple(sorted(unprobed, key=lambda row: -row.share)),
            traced_ms=total / 1e6,
            probed_share=shared / total,
            same_traced_ms=same_traced / 1e6,
            same_probed_ms=same_probed / 1e6,
            budget_s=budget_s,
            wall_s=wall_s,
            saved=saved,
            notes=notes,
        )


def _place(context: StepContext, device: ProbedDevice) -> str:
    """The trace's own name if the probe ran where the trace did."""
    if device.kind != "cpu":
        return device.place
    load = context.cpu.load if context.cpu else None
    return cpu_place(device.host, load.threads if load and context.on_host else 0)


def _elsewhere(context: StepContext, device: ProbedDevice) -> list[str]:
    traced, here = place_of(context), _place(context, device)
    if traced is None or traced == here:
        return []
    return [
        f"the trace ran on {traced}, the probe on {here}: what-ifs of this trace do not use its "
        "times; probe there, or carry the library over (stepscope library export)"
    ]


def _unprobed(call: OperatorCall, mode: str, share: float, why: str) -> UnprobedOperator:
    return UnprobedOperator(name=call.name, shapes=call.shapes, mode=mode, share=share, why=why)


def _outputs(answer: dict[str, Any]) -> tuple[Output, ...] | None:
    outputs = answer.get("outputs")
    return None if outputs is None else msgspec.convert(outputs, tuple[Output, ...])


def _timing(answer: dict[str, Any], name: str) -> PassTime | None:
    timing = answer.get(name)
    return msgspec.convert(timing, PassTime) if timing else None


def _spent_ns(answer: dict[str, Any]) -> float | None:
    """Of both passes; None if it was not timed."""
    forward, backward = _timing(answer, "forward"), _timing(answer, "backward")
    if forward is None:
        return None
    return forward.ns + (backward.ns if backward else 0.0)


def _spread(answer: dict[str, Any]) -> float | None:
    timings = [timing for name in ("forward", "backward") if (timing := _timing(answer, name))]
    whole = sum(timing.ns for timing in timings)
    if not whole:
        return None
    return float(sum((timing.ns * timing.spread) ** 2 for timing in timings) ** 0.5 / whole)
