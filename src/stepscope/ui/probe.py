"""Time a step's operators one by one, the most expensive first, keep the times, and sum them up."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from stepscope.errors import NotCapturedError, StepscopeError, UsageError
from stepscope.predict.autocast import changed_mode, traced_mode
from stepscope.predict.declaration import Refused, WrongValue
from stepscope.predict.operator_library import (
    LibraryProblemError,
    grown_operators,
    parameter_shapes,
    place_of,
    save_times,
)
from stepscope.predict.step_context import StepContext
from stepscope.predict.step_operators import StepOperators, find_step_operators, follow_values
from stepscope.predict.whatifs.batch import batch_factor
from stepscope.records.change_values import PRECISIONS, uses_autocast
from stepscope.records.hardware import (
    OUT_OF_TIME,
    OperatorCall,
    OperatorTime,
    Output,
    PassTime,
    ProbedDevice,
    ProbedOperator,
    ProbeReport,
    UnprobedOperator,
    cpu_place,
)
from stepscope.records.prediction import Setting
from stepscope.text.figures import percent
from stepscope.text.words import counted
from stepscope.ui.jobs.environment import own_python
from stepscope.ui.jobs.process import ask_line

if TYPE_CHECKING:
    from stepscope.step.graph import Floats

    Show = Callable[[str, float], None]
    Clock = Callable[[], float]

_HOST_PART = 0.15  # of the budget, at most: what autocast costs the host
_NO_OPERATOR = "no operator in the trace launched it"


def modes_of(settings: Sequence[Setting]) -> tuple[str, ...]:
    """Return the precisions and batches asked for: `bf16`, `batch=x2`. UsageError for anything
    that a probe cannot change."""
    for setting in settings:
        if setting.name not in ("precision", "batch"):
            raise UsageError(
                f"probe --set {setting}: operators can be timed with precision=... and "
                "batch=... only"
            )
        if setting.name == "precision" and setting.value not in PRECISIONS:
            raise UsageError(f"precision={setting.value}: choose one of {', '.join(PRECISIONS)}")
    names = (str(one) if one.name == "batch" else one.value for one in settings)
    return tuple(dict.fromkeys(names))


def probe_step(
    context: StepContext,
    precisions: Sequence[str],
    prober: Prober,
    *,
    budget_s: float,
    show: Show = lambda *_: None,
    clock: Clock = time.monotonic,
) -> ProbeReport:
    """Raises NotCapturedError for a trace without shapes."""
    began = clock()
    operators = find_step_operators(context)
    if not operators.calls or not operators.item_ns.sum():
        raise NotCapturedError(
            f"{context.trace.path} has no operator shapes. Record the trace with record_shapes=True"
        )
    device = prober.device()
    started = clock()  # a process that loads torch takes its time, which is not the budget's
    probe = StepProbe(context, operators, precisions, prober)
    if device.kind != "cpu":  # a CPU's operators are the host's own time
        probe.time_host(started + _HOST_PART * budget_s, clock)
    probe.time_calls(started + budget_s, show, clock)
    place, notes = _place(context, device), [*_elsewhere(context, device), *_left_out(probe)]
    saved = 0
    try:
        times = probe.times(place, device.software)
        save_times(times)
        saved = len(times)
    except LibraryProblemError as problem:
        notes.append(f"{problem}. The times are not saved")
    total_ns = max(float(operators.item_ns.sum()), 1.0)
    unprobed = [*_untimed(probe, total_ns), *_without_operator(context, operators, total_ns)]
    timed = [group for group in probe.groups if _is_timed(probe, group)]
    alike = [(group, ns) for group in probe.groups if (ns := _probed_ns(probe, group, 0))]
    return ProbeReport(
        place=place,
        traced_place=place_of(context),
        software=device.software,
        modes=tuple(probe.modes)[1:],
        operators=tuple(_row(probe, group) for group in probe.groups if group.traced_ns),
        unprobed=tuple(sorted(unprobed, key=lambda row: -row.share)),
        traced_ms=total_ns / 1e6,
        probed_share=sum(group.traced_ns for group in timed) / total_ns,
        same_traced_ms=sum(group.traced_ns for group, _ in alike) / 1e6,
        same_probed_ms=sum(ns for _, ns in alike) / 1e6,
        host_added_ms=_host_added(probe),
        budget_s=budget_s,
        wall_s=clock() - began,
        saved=saved,
        notes=tuple(notes),
    )


def _probed_ns(probe: StepProbe, group: CallGroup, number: int) -> float | None:
    """All calls of the group in a mode."""
    spent = probe.spent_ns(group, number)
    return None if spent is None else spent * group.count


def _is_timed(probe: StepProbe, group: CallGroup) -> bool:
    return all(probe.spent_ns(group, number) is not None for number in range(len(probe.modes)))


def _row(probe: StepProbe, group: CallGroup) -> ProbedOperator:
    spent = [_probed_ns(probe, group, number) for number in range(len(probe.modes))]
    return ProbedOperator(
        name=group.made[0].name,
        shapes=group.made[0].shapes,
        count=group.count,
        traced_ms=group.traced_ns / 1e6,
        probed_ms=None if spent[0] is None else spent[0] / 1e6,
        modes_ms={
            mode: ns / 1e6
            for mode, ns in zip(tuple(probe.modes)[1:], spent[1:], strict=True)
            if ns is not None
        },
        spread=probe.spread(group),
    )


def _untimed(probe: StepProbe, total_ns: float) -> Iterator[UnprobedOperator]:
    for group in probe.groups:
        for number, mode in enumerate(probe.modes):
            if group.traced_ns and probe.spent_ns(group, number) is None:
                yield UnprobedOperator(
                    name=group.made[0].name,
                    shapes=group.made[0].shapes,
                    mode=mode,
                    share=group.traced_ns / total_ns,
                    why=probe.why_not(group, number) or OUT_OF_TIME,
                )


def _without_operator(
    context: StepContext, operators: StepOperators, total_ns: float
) -> Iterator[UnprobedOperator]:
    """Return what cannot be rebuilt at all: collectives, compiled kernels, copies from the host."""
    graph, trace = context.graph, context.trace
    around = graph.calls.operator if context.on_host else graph.calls.operator[graph.tasks.call]
    free = operators.owner < 0
    lost: dict[str, float] = defaultdict(float)
    for row, ns in zip(around[free].tolist(), operators.item_ns[free].tolist(), strict=True):
        lost[trace.strings[trace.host.name[row]] if row >= 0 else "kernels"] += ns
    for name, ns in lost.items():
        if ns:
            share = ns / total_ns
            yield UnprobedOperator(name=name, shapes="", mode="", share=share, why=_NO_OPERATOR)


def _host_added(probe: StepProbe) -> dict[str, float]:
    """Return it by precision, as far as it was measured."""
    added = {mode: probe.host_added_ns(number) for number, mode in enumerate(probe.modes) if number}
    return {mode: ns / 1e6 for mode, ns in added.items() if ns is not None}


def _place(context: StepContext, device: ProbedDevice) -> str:
    """Return the trace's own name if the probe ran where the trace did."""
    if device.kind != "cpu":
        return device.place
    load = context.cpu.load if context.cpu else None
    return cpu_place(device.host, load.threads if load and context.on_host else 0)


def _left_out(probe: StepProbe) -> list[str]:
    return [
        f"{change} is not timed: the trace does not say its batch, or the new batch is not a "
        "whole number of samples"
        for change in probe.left_out
    ]


def _elsewhere(context: StepContext, device: ProbedDevice) -> list[str]:
    traced, here = place_of(context), _place(context, device)
    if traced is None or traced == here:
        return []
    if not context.on_host and device.kind != "cpu":
        return [
            f"the trace ran on {traced}, the probe on {here}. `whatif --set gpu=` and `gpus` "
            "use these times; other predictions for this trace do not"
        ]
    return [
        f"the trace ran on {traced}, the probe on {here}. Predictions for this trace do not "
        f"use these times. Probe on {traced}, or carry the library over (stepscope probe "
        "export)"
    ]


# The distinct calls of a step, timed one by one: the most expensive first.

_SHORTEST_S, _LONGEST_S = 0.02, 1.5  # for one call in one mode
_DESCRIBE_S = 5.0
_FIRST_ROUND = 0.8  # of the budget: every call has its turn; then those known least again
_GOOD_SPREAD, _MOST_RETRIES = 0.02, 3
_NO_BACKWARD = "its backward pass was not rebuilt"


class Prober(Protocol):
    """What times calls: a child process, or a made-up one in tests."""

    def device(self) -> ProbedDevice: ...

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]: ...


class CallGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Places of the step that make the same call, whatever the mode."""

    made: tuple[OperatorCall, ...]  # by mode
    count: int
    forward_ns: float  # traced, of all of them
    backward_ns: float

    @property
    def traced_ns(self) -> float:
        return self.forward_ns + self.backward_ns


class StepProbe:
    """The step's calls in its own mode and in others, and what is known of each."""

    def __init__(
        self,
        context: StepContext,
        operators: StepOperators,
        changes: Sequence[str],
        prober: Prober,
    ) -> None:
        """`changes` are precisions, and batches such as `batch=x2`."""
        self._prober = prober
        self._answers: dict[OperatorCall, dict[str, Any]] = {}
        self._operators = operators
        traced, shapes = traced_mode(context), parameter_shapes(context)
        grown = {
            change: after
            for change in changes
            if _is_batch(change) and (after := _grown(context, operators, change))
        }
        self.left_out = [change for change in changes if _is_batch(change) and change not in grown]
        asked = {
            change: traced if change in grown else changed_mode(context, change)
            for change in changes
            if change not in self.left_out
        }
        # The step as it is has no name among changes, and comes first.
        self.modes = {"": traced} | {
            name: mode for name, mode in asked.items() if mode != traced or name in grown
        }
        self._made = [
            follow_values(
                grown.get(name, operators).calls, shapes, mode, self._describe, traced=traced
            )
            for name, mode in self.modes.items()
        ]
        for call in self._made[0]:  # what the optimizer returns is not asked: nothing follows it
            self._answers.setdefault(call, {"outputs": []})

    def _describe(self, call: OperatorCall) -> Sequence[Output] | None:
        if call not in self._answers:
            request = {"do": "describe", **call.request()}
            self._answers[call] = self._prober.ask(request, _DESCRIBE_S)
        return _outputs(self._answers[call])

    @cached_property
    def groups(self) -> tuple[CallGroup, ...]:
        """Return them, the longest first."""
        places: dict[tuple[OperatorCall, ...], list[int]] = {}
        for place, made in enumerate(zip(*self._made, strict=True)):
            places.setdefault(made, []).append(place)
        passes = [self._operators.pass_ns(backward=backward) for backward in (False, True)]
        groups = [
            CallGroup(
                made=made,
                count=len(mine),
                forward_ns=_sum(passes[0], mine),
                backward_ns=_sum(passes[1], mine),
            )
            for made, mine in places.items()
        ]
        return tuple(sorted(groups, key=lambda group: -group.traced_ns))

    def time_host(self, ends: float, clock: Clock) -> None:
        """Return what the host needs for the calls of the forward pass, where autocast may
        change it.
        """
        if not any(map(uses_autocast, self.modes.values())):
            return
        in_forward = {
            call
            for made in self._made
            for place, call in enumerate(made)
            if self._operators.calls[place].in_forward
        }
        for call in (call for group in self.groups for call in group.made if call in in_forward):
            answer = self._answers[call]
            if "error" in answer or "host_ns" in answer:
                continue
            if clock() >= ends:
                return
            timed = self._prober.ask({"do": "host", **call.request()}, _DESCRIBE_S)
            if "host_ns" in timed:
                answer["host_ns"] = timed["host_ns"]

    def time_calls(self, ends: float, show: Show, clock: Clock) -> None:
        """Each with its share of the time."""
        groups = [group for group in self.groups if group.traced_ns]
        total, first_round_s = sum(group.traced_ns for group in groups), ends - clock()
        first_round_s *= _FIRST_ROUND
        done = 0.0
        for group in groups:
            seconds = first_round_s * group.traced_ns / total / len(group.made)
            done += group.traced_ns
            for call in group.made:
                if clock() >= ends:
                    return
                if _spread(self._answers[call]) is None:  # else another precision has it too
                    show(call.name, done / total)
                    self._time(call, min(max(seconds, _SHORTEST_S), _LONGEST_S))
        self._refine(groups, ends, clock)

    @cached_property
    def _with_backward(self) -> set[OperatorCall]:
        """Calls whose backward pass takes time in the trace."""
        return {call for group in self.groups if group.backward_ns for call in group.made}

    def _time(self, call: OperatorCall, seconds: float) -> None:
        """An answer that is known better than the one before replaces it."""
        before = self._answers[call]
        if "error" in before:
            return
        request = {"do": "time", "seconds": seconds, "backward": call in self._with_backward}
        answer = self._prober.ask({**request, **call.request()}, seconds)
        had, has = _spread(before), _spread(answer)
        if had is None or (has is not None and has < had):
            self._answers[call] = {**before, **answer}

    def _refine(self, groups: Sequence[CallGroup], ends: float, clock: Clock) -> None:
        """Spend what is left of the budget where a time is least known."""
        weight_of = {call: group.traced_ns for group in groups for call in group.made}
        again = dict.fromkeys(weight_of, 0)

        def doubt_ns(call: OperatorCall) -> float:
            spread = _spread(self._answers[call]) or 0.0
            return spread * weight_of[call] if spread > _GOOD_SPREAD else 0.0

        while again and clock() < ends:
            call = max(again, key=doubt_ns)
            if not doubt_ns(call):
                return
            again[call] += 1
            self._time(call, min(_LONGEST_S, max(_SHORTEST_S, ends - clock())))
            if again[call] == _MOST_RETRIES:
                del again[call]

    # What is known now.

    def spent_ns(self, group: CallGroup, number: int) -> float | None:
        """Return a call of the group in a mode: the passes that take time in the trace; None if
        one of them was not timed."""
        answer = self._answers[group.made[number]]
        total = 0.0
        for name, traced_ns in (("forward", group.forward_ns), ("backward", group.backward_ns)):
            timing = _timing(answer, name)
            if traced_ns and timing is None:
                return None
            total += timing.ns if traced_ns and timing else 0.0
        return total

    def why_not(self, group: CallGroup, number: int) -> str | None:
        """Return why a call of the group was not timed in a mode; None: the time was over."""
        answer = self._answers[group.made[number]]
        untimed = _timing(answer, "forward") is None
        return answer.get("error") if untimed else _NO_BACKWARD

    def spread(self, group: CallGroup) -> float | None:
        """Half of the 95% interval in the step's own mode, relative."""
        return _spread(self._answers[group.made[0]])

    def host_added_ns(self, number: int) -> float | None:
        """Return what the host needs more for a step in a mode; None if not all of its calls are
        known.
        """
        total = 0.0
        for group in self.groups:
            before, after = (self._answers[group.made[at]] for at in (0, number))
            if "host_ns" in before and "host_ns" in after:
                total += group.count * (after["host_ns"] - before["host_ns"])
            elif group.made[0] != group.made[number] and "error" not in {**before, **after}:
                return None
        return total

    def times(self, place: str, software: str) -> list[OperatorTime]:
        """Also calls that were only described: what they return is needed to follow dtypes."""
        return [
            OperatorTime(
                call=call,
                outputs=outputs,
                forward=_timing(answer, "forward"),
                backward=_timing(answer, "backward"),
                host_ns=answer.get("host_ns"),
                place=place,
                software=software,
                when_unix=time.time(),
            )
            for call, answer in self._answers.items()
            if (outputs := _outputs(answer)) is not None
        ]


def _is_batch(change: str) -> bool:
    return change.startswith("batch=")


def _grown(context: StepContext, operators: StepOperators, change: str) -> StepOperators | None:
    """Return None for a batch that the trace gives no ground for; UsageError for one that makes no
    sense."""
    try:
        factor = batch_factor(context, change.removeprefix("batch="))
    except WrongValue as reason:
        raise UsageError(str(reason)) from None
    except Refused:
        return None
    return grown_operators(context, operators, factor)


def _sum(values: Floats, places: list[int]) -> float:
    return float(np.sum(values[places]))


def _outputs(answer: dict[str, Any]) -> tuple[Output, ...] | None:
    outputs = answer.get("outputs")
    return None if outputs is None else msgspec.convert(outputs, tuple[Output, ...])


def _timing(answer: dict[str, Any], name: str) -> PassTime | None:
    timing = answer.get(name)
    return msgspec.convert(timing, PassTime) if timing else None


def _spread(answer: dict[str, Any]) -> float | None:
    """Return that of both passes together; None if it was not timed."""
    timings = [timing for name in ("forward", "backward") if (timing := _timing(answer, name))]
    if not timings:
        return None
    whole = sum(timing.ns for timing in timings)
    parts = sum((timing.ns * timing.spread) ** 2 for timing in timings)
    return float(parts**0.5 / max(whole, 1.0))


# A run that has just ended, and the process that times operators: what crashes it does not end the
# probe, and nothing here fails the run.

REPORT = "probe.json"


def asked_precisions(settings: Sequence[str], *, probe: bool) -> tuple[str, ...]:
    """Return what `run --probe --set ...` asks for; UsageError before the command starts."""
    if settings and not probe:
        raise UsageError("--set needs --probe: stepscope run --probe --set precision=bf16")
    return modes_of([Setting.parse(text) for text in settings])


def probe_run(
    folder: Path, precisions: Sequence[str], budget_s: float, *, on_cpu: bool = True
) -> str:
    """Time the operators of a run folder's step, keep the report there, and say how it went. Empty
    if the step ran `on_cpu` and nobody wants that."""
    from stepscope.ui.advice import open_slowest

    if find_spec("torch") is None:
        return "no operator was timed: stepscope's Python has no torch"
    try:
        context = open_slowest(str(folder), cache=True)[0].context
        if context.on_host and not on_cpu:
            return ""
        load = context.cpu.load if context.cpu else None
        with ProbeChild(load.threads if load else 0) as child:
            report = probe_step(context, precisions, child, budget_s=budget_s)
        from stepscope.measure import folder as layout
        from stepscope.ui.topics.measurements import probe_json

        layout.try_write_json(folder / REPORT, probe_json(report))
    except StepscopeError as error:
        return f"no operator was timed: {error}"
    except Exception as error:
        return f"no operator was timed: a defect in stepscope: {type(error).__name__}: {error}"
    timed = sum(row.probed_ms is not None for row in report.operators)
    if not timed:
        longest = [f"{row.name}: {row.why}" for row in report.unprobed]
        return f"no operator was timed: {longest[0] if longest else 'the step has no operator'}"
    notes = "".join(f"; {note}" for note in report.notes)
    return (
        f"probed {counted(timed, 'distinct call')} on {report.place}, "
        f"{percent(report.probed_share)} of the step's operators{notes}"
    )


_START_S = 120.0  # for torch and a device to come up
_PATIENCE_S = 30.0  # that a call may take beyond the time it was given
_COMMAND = own_python("stepscope.measure.probe")


class ProbeChild:
    """Started at once, so that it loads torch meanwhile, and again after a crash."""

    def __init__(self, threads: int = 0, command: Sequence[str] = _COMMAND) -> None:
        self._threads, self._command = threads, command
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self.crashes = 0

    def __enter__(self) -> ProbeChild:
        self._launch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop()

    def device(self) -> ProbedDevice:
        """Raises StepscopeError if no process comes up."""
        return msgspec.convert(self._start(), ProbedDevice)

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer; a crash or a hang is an answer with an `error`."""
        if not self._ready:
            self._start()
        answer = self._exchange(request, seconds + _PATIENCE_S)
        if answer is not None:
            return answer
        code = self._stop()
        self.crashes += 1
        if code is None:
            return {"error": f"it did not finish within {seconds + _PATIENCE_S:g} s"}
        return {"error": f"its process ended ({_why(code)})"}

    def _launch(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _start(self) -> dict[str, Any]:
        if self._process is None:
            self._launch()
        answer = self._exchange({"do": "start", "threads": self._threads}, _START_S)
        if answer is None:
            self._stop()
            raise StepscopeError(
                "the process that times operators does not start. Run "
                f"`{shlex.join(_COMMAND)}` to see why"
            )
        self._ready = True
        return answer

    def _exchange(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Return None if the process ended or the time is over."""
        assert self._process is not None
        try:
            line = json.dumps(request).encode() + b"\n"
            answer: dict[str, Any] = json.loads(ask_line(self._process, line, seconds))
        except OSError:
            return None
        return answer

    def _stop(self) -> int | None:
        """Its exit code if it had ended by itself."""
        process, self._process, self._ready = self._process, None, False
        if process is None:
            return None
        code: int | None
        _close(process.stdin)  # an idle process ends when nothing more can come
        try:
            code = process.wait(timeout=0.5) if process.poll() is None else process.returncode
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            process.wait()
        _close(process.stdout)
        return code


def _close(pipe: IO[bytes] | None) -> None:
    with contextlib.suppress(OSError):
        if pipe:
            pipe.close()


def _why(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        return f"signal {name}"
    return f"exit code {code}"
