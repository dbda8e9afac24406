"""What is known of a call's time: measured exactly, else from neighbours, with its error.

A neighbour is the same call with other software, or with shapes that all differ by one factor, as
they do for another batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from stepscope.records.operator_times import OperatorCall, OperatorTime, PassTime

_OTHER_SOFTWARE = 0.08  # relative error, if a library or driver changed
_BETWEEN = 0.05  # relative error of a time between two neighbours of twice the size
_BESIDE = 0.2  # and of one that is continued from one side only, for twice the size
_FARTHEST = math.log(2.0) + 1e-9  # in size, from the nearest neighbour


class KnownTime(msgspec.Struct, frozen=True, kw_only=True):
    time: OperatorTime
    error: float  # relative
    basis: str  # probed, or remembered: from neighbours


class KnownTimes:
    """Times of one place."""

    def __init__(self, times: Iterable[OperatorTime], software: Collection[str]) -> None:
        """`software` of the step to predict, as far as it is known: names with versions."""
        self._exact: dict[OperatorCall, OperatorTime] = {}
        self._older: dict[OperatorCall, OperatorTime] = {}
        self._alike: dict[tuple[object, ...], list[OperatorTime]] = {}
        for time in times:  # later ones replace earlier ones
            same = set(software) <= set(time.software.split(", "))
            (self._exact if same else self._older)[time.call] = time
        for time in (*self._older.values(), *self._exact.values()):
            if time.forward:
                self._alike.setdefault(_without_sizes(time.call), []).append(time)

    def find(self, call: OperatorCall) -> KnownTime | None:
        if time := self._exact.get(call):
            return KnownTime(time=time, error=_spread(time), basis="probed")
        if time := self._older.get(call):
            error = math.hypot(_spread(time), _OTHER_SOFTWARE)
            return KnownTime(time=time, error=error, basis="remembered")
        return self._between(call)

    def _between(self, call: OperatorCall) -> KnownTime | None:
        sized = [
            (math.log(factor), time)
            for time in self._alike.get(_without_sizes(call), [])
            if (factor := size_factor(time.call, call)) is not None
        ]
        smaller = max((pair for pair in sized if pair[0] < 0), default=None, key=lambda p: p[0])
        larger = min((pair for pair in sized if pair[0] > 0), default=None, key=lambda p: p[0])
        nearest = [pair for pair in (smaller, larger) if pair]
        if not nearest or min(abs(distance) for distance, _ in nearest) > _FARTHEST:
            return None
        if smaller and larger:
            part = -smaller[0] / (larger[0] - smaller[0])
            time = _mixed(smaller[1], larger[1], part)
            error = _BETWEEN * (larger[0] - smaller[0]) / math.log(4.0)
        else:
            distance, only = nearest[0]
            time = _scaled(only, math.exp(-distance))
            error = _BESIDE * abs(distance) / math.log(2.0)
        spread = max(_spread(time) for _, time in nearest)
        outputs = ()  # those of another size
        return KnownTime(
            time=replace(time, call=call, outputs=outputs),
            error=math.hypot(error, spread),
            basis="remembered",
        )


def size_factor(known: OperatorCall, wanted: OperatorCall) -> float | None:
    """How much larger the known call is, if one factor turns the wanted shapes into its own."""
    pairs = list(zip(_sides(known), _sides(wanted), strict=False))
    factors = {had / has for had, has in pairs if had != has and has and had}
    return factors.pop() if len(factors) == 1 else None


def _without_sizes(call: OperatorCall) -> tuple[object, ...]:
    order = tuple(_order(steps) for steps in _decoded(call.strides))
    ranks = tuple(_rank(dims) for dims in _decoded(call.shapes))
    return call.name, call.dtypes, call.concrete, call.grads, call.mode, order, ranks


def _rank(dims: object) -> object:
    if not isinstance(dims, list):
        return 0
    return tuple(map(_rank, dims)) if dims and isinstance(dims[0], list) else len(dims)


def _order(steps: object) -> tuple[int, ...]:
    """The layout without its sizes."""
    if not isinstance(steps, list) or any(isinstance(step, list) for step in steps):
        return ()
    return tuple(sorted(range(len(steps)), key=lambda place: (-steps[place], place)))


def _decoded(text: str) -> list[object]:
    return msgspec.json.decode(text, type=list) if text else []


def _sides(call: OperatorCall) -> list[int]:
    sides: list[int] = []
    for dims in _decoded(call.shapes):
        for side in dims if isinstance(dims, list) else ():
            sides += side if isinstance(side, list) else [side]
    return sides


def _spread(time: OperatorTime) -> float:
    """Relative half interval of forward and backward together."""
    timings = [timing for timing in (time.forward, time.backward) if timing]
    whole = sum(timing.ns for timing in timings)
    parts = sum((timing.ns * timing.spread) ** 2 for timing in timings)
    return math.sqrt(parts) / whole if whole else 0.0


def _mixed(smaller: OperatorTime, larger: OperatorTime, part: float) -> OperatorTime:
    def mix(low: PassTime | None, high: PassTime | None) -> PassTime | None:
        if not low or not high:
            return None
        logs = math.log(max(low.ns, 1.0)), math.log(max(high.ns, 1.0))
        return replace(low, ns=math.exp(logs[0] + part * (logs[1] - logs[0])))

    return replace(
        smaller,
        forward=mix(smaller.forward, larger.forward),
        backward=mix(smaller.backward, larger.backward),
    )


def _scaled(time: OperatorTime, factor: float) -> OperatorTime:
    def scale(timing: PassTime | None) -> PassTime | None:
        return replace(timing, ns=timing.ns * factor) if timing else None

    return replace(time, forward=scale(time.forward), backward=scale(time.backward))
