"""The distinct calls of a step, timed one by one: the most expensive first."""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from stepscope.errors import UsageError
from stepscope.predict.outcome import Refused, WrongValue
from stepscope.predict.probed_step import grown_operators, parameter_shapes
from stepscope.predict.traced_mode import changed_mode, traced_mode
from stepscope.predict.value_flow import follow_values
from stepscope.predict.whatifs.batch import batch_factor
from stepscope.records.operator_times import OperatorTime, Output, PassTime
from stepscope.records.probe_modes import uses_autocast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.explain.replay.graph import Floats
    from stepscope.predict.step_context import StepContext
    from stepscope.predict.step_operators import StepOperators
    from stepscope.records.operator_times import OperatorCall, ProbedDevice

    Show = Callable[[str, float], None]
    Clock = Callable[[], float]

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
        """The longest first."""
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
        """What the host needs for the calls of the forward pass, where autocast may change it."""
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
        """A call of the group in a mode: the passes that take time in the trace; None if one of
        them was not timed."""
        answer = self._answers[group.made[number]]
        total = 0.0
        for name, traced_ns in (("forward", group.forward_ns), ("backward", group.backward_ns)):
            timing = _timing(answer, name)
            if traced_ns and timing is None:
                return None
            total += timing.ns if traced_ns and timing else 0.0
        return total

    def why_not(self, group: CallGroup, number: int) -> str | None:
        """Why a call of the group was not timed in a mode; None: the time was over."""
        answer = self._answers[group.made[number]]
        untimed = _timing(answer, "forward") is None
        return answer.get("error") if untimed else _NO_BACKWARD

    def spread(self, group: CallGroup) -> float | None:
        """Half of the 95% interval in the step's own mode, relative."""
        return _spread(self._answers[group.made[0]])

    def host_added_ns(self, number: int) -> float | None:
        """What the host needs more for a step in a mode; None if not all of its calls are known."""
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
    """None for a batch that the trace gives no ground for; UsageError for one that makes no
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
    """Of both passes together; None if it was not timed."""
    timings = [timing for name in ("forward", "backward") if (timing := _timing(answer, name))]
    if not timings:
        return None
    whole = sum(timing.ns for timing in timings)
    parts = sum((timing.ns * timing.spread) ** 2 for timing in timings)
    return float(parts**0.5 / max(whole, 1.0))
