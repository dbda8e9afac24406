"""Promised against delivered: what `whatif` said, what comparisons measured, what follows from it.

promise = make_promise(prediction, workload, path)    # in `whatif`
remember(promise)
ms, low, high = adjust(promise.name, ms, low, high, history())
forget(promise.id)                                    # in `record forget`

Which promise a comparison answers: answer.py.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import UsageError
from stepscope.records.promise import Delivery, Forgotten, Kept, Promise, Workload
from stepscope.trace.user_folders import this_host
from stepscope.verify.record_file import append, read_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.prediction import Prediction
    from stepscope.verify.record_file import Line

# So many deliveries weigh as much as what the prediction says of itself.
PRIOR = 4
# A promised interval is meant to hold this often: its half-width is that many standard deviations.
_NORMAL = 1.959964
# An interval narrower than this share says more than anybody knows.
_NARROWEST = 0.01
_FARTHEST = 2.0  # half-widths that a delivery counts as at most, however far off it is
MOST_MOVED = 1.25  # the record never makes a prediction longer or shorter by more
ANY_BASELINE = 2.0  # A's step over the promise's at most, where the user says which promise it is
VAGUE = 1.25  # a measured change answers nothing where its interval is wider, each way


class Lesson(msgspec.Struct, frozen=True, kw_only=True):
    """What earlier predictions of one what-if teach the next one."""

    deliveries: int
    shift: float  # as a logarithm: the step is multiplied by its exponential
    stretch: float  # of the distances to both ends, as logarithms


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One what-if's record."""

    name: str
    promised: int
    delivered: int
    median_error: float | None  # size of delivered over predicted, less one
    median_bias: float | None  # the same with its sign: above zero, slower than promised
    inside: float | None  # share of deliveries inside the promised interval


def make_promise(
    prediction: Prediction, workload: Workload | None = None, path: str | None = None
) -> Promise:
    """As it will be remembered: with a name of its own, now, on this host."""
    import secrets

    return Promise(
        id=secrets.token_hex(4),
        when_unix=time.time(),
        host=this_host(),
        settings=prediction.settings,
        baseline_ms=prediction.baseline_ms,
        predicted_ms=prediction.predicted_ms,
        low_ms=prediction.low_ms,
        high_ms=prediction.high_ms,
        workload=workload or Workload(),
        path=path,
    )


def remember(promise: Promise) -> Promise:
    """Write it down; raises UsageError where that is not possible.

    The same promise, still open, is not made twice: one trial would answer it twice.
    """
    if not (promise.settings and promise.predicted_ms > 0 and promise.baseline_ms > 0):
        raise UsageError("a promise needs a what-if, a baseline and a predicted step")
    known = next((each for each in open_promises() if _is_same(each, promise)), None)
    if known is not None:
        return known
    append(promise)
    return promise


def _is_same(one: Promise, other: Promise) -> bool:
    return msgspec.structs.replace(one, id=other.id, when_unix=other.when_unix) == other


def history(host: str | None = None, *, every_host: bool = False) -> tuple[Kept, ...]:
    """All promises of a host (this one for None), oldest first, each with its newest delivery.

    What was forgotten is left out, and so is a delivery that would not be taken today.
    """
    lines = read_lines()
    wanted = host or this_host()
    promises = _remembered(lines)
    deliveries: dict[str, Delivery] = {}
    for line in _deliveries(lines, promises):
        if why_ignored(promises[line.promise], line) is None:
            known = deliveries.get(line.promise, line)
            deliveries[line.promise] = max(known, line, key=lambda each: each.when_unix)
    kept = [
        Kept(promise=promise, delivery=deliveries.get(promise.id))
        for promise in promises.values()
        if every_host or promise.host == wanted
    ]
    return tuple(sorted(kept, key=lambda each: each.promise.when_unix))


def ignored_deliveries(
    host: str | None = None, *, every_host: bool = False
) -> tuple[tuple[Delivery, str], ...]:
    """Deliveries in the file that teach nothing, each with the reason."""
    lines = read_lines()
    wanted = host or this_host()
    promises = _remembered(lines)
    told = [
        (line, why_ignored(promises[line.promise], line))
        for line in _deliveries(lines, promises)
        if every_host or promises[line.promise].host == wanted
    ]
    return tuple((line, why) for line, why in told if why is not None)


def why_ignored(promise: Promise, delivery: Delivery) -> str | None:
    """Why a delivery would not answer its promise by today's rules; None where it counts."""
    if not delivery.named and not delivery.seen:
        return "nothing shows that the promised change was made"
    return off_baseline(promise, delivery.a_ms) or too_vague(delivery.low, delivery.high)


def off_baseline(promise: Promise, a_ms: float, within: float = ANY_BASELINE) -> str | None:
    """Why A's step cannot be the one that the promise is about."""
    if abs(math.log(a_ms / promise.baseline_ms)) <= math.log(within):
        return None
    return f"A takes {a_ms:.2f} ms a step, and the promise is about {promise.baseline_ms:.2f} ms"


def too_vague(low: float, high: float) -> str | None:
    """Why a measured change says too little about a promised step."""
    half = (math.log1p(high) - math.log1p(low)) / 2 if low > -1 else math.inf
    if half <= math.log(VAGUE):
        return None
    return f"the change is only known to lie between {low:+.0%} and {high:+.0%}"


def open_promises(host: str | None = None) -> tuple[Promise, ...]:
    """Those that no comparison has answered yet, newest first."""
    return tuple(each.promise for each in reversed(history(host)) if each.delivery is None)


def find_promise(promise_id: str) -> Promise:
    """By its id, or as much of it as is needed."""
    found = [
        each.promise for each in history(every_host=True) if each.promise.id.startswith(promise_id)
    ]
    exact = [promise for promise in found if promise.id == promise_id]
    if len(exact or found) == 1:
        return (exact or found)[0]
    raise UsageError(
        f"{promise_id}: {'no' if not found else 'more than one'} promise has that id; "
        "stepscope record lists them"
    )


def forget(promise_id: str, *, delivery_only: bool = False) -> Promise:
    """No longer count a promise, or what was delivered of it so far: then it is open again.

    A line is added to the record; nothing is written over.
    """
    promise = find_promise(promise_id)
    append(Forgotten(promise=promise.id, when_unix=time.time(), delivery_only=delivery_only))
    return promise


def forget_all_of(name: str, *, delivery_only: bool = False) -> tuple[Promise, ...]:
    """Every promise of one what-if on this host, such as precision."""
    named = [each.promise for each in history() if each.promise.name == name]
    if not named:
        raise UsageError(f"--all-of {name}: no promise of that name; stepscope record lists them")
    return tuple(forget(promise.id, delivery_only=delivery_only) for promise in named)


def _remembered(lines: Sequence[Line]) -> dict[str, Promise]:
    gone = {x.promise for x in lines if isinstance(x, Forgotten) and not x.delivery_only}
    return {x.id: x for x in lines if isinstance(x, Promise) and x.id not in gone}


def _deliveries(lines: Sequence[Line], promises: dict[str, Promise]) -> list[Delivery]:
    """Of promises that are remembered, without those that were forgotten since."""
    until: dict[str, float] = {}
    for line in lines:
        if isinstance(line, Forgotten):
            until[line.promise] = max(until.get(line.promise, 0.0), line.when_unix)
    return [
        line
        for line in lines
        if isinstance(line, Delivery)
        and line.promise in promises
        and line.when_unix > until.get(line.promise, -1.0)
    ]


def summarise(kept: Sequence[Kept]) -> tuple[Summary, ...]:
    """One row a what-if, the most delivered first."""
    names = dict.fromkeys(each.promise.name for each in kept)
    rows = [_summary(name, [each for each in kept if each.promise.name == name]) for name in names]
    return tuple(sorted(rows, key=lambda row: (-row.delivered, -row.promised, row.name)))


def adjust(
    name: str, predicted_ms: float, low: float, high: float, history: Sequence[Kept]
) -> tuple[float, float, float]:
    """A prediction moved and widened by what became of earlier ones of the same what-if."""
    lesson = learn(name, history)
    if lesson is None or not 0 < low <= predicted_ms <= high:
        return predicted_ms, low, high
    below = max(math.log(predicted_ms / low), _NARROWEST) * lesson.stretch
    above = max(math.log(high / predicted_ms), _NARROWEST) * lesson.stretch
    moved = predicted_ms * math.exp(lesson.shift)
    return moved, moved * math.exp(-below), moved * math.exp(above)


def learn(name: str, history: Sequence[Kept]) -> Lesson | None:
    """What the deliveries of one what-if teach; None without any.

    With n of them, e = ln(delivered / predicted) of each, and h the promised half-width, as a
    logarithm, on the side where e lies:

        shift   = n / (n + 4) x median(e), where an e counts as 2 h or ln 1.25 at most
        stretch = sqrt((4 + sum((1.96 miss)^2)) / (4 + n)), never below 1
        miss    = |e - shift| / h, 2 at most

    So one delivery, however far off, moves a prediction by 4.6% and doubles its interval at most.
    """
    told = [each for each in history if each.promise.name == name and each.delivered_ms is not None]
    if not told:
        return None
    from statistics import median

    errors = [math.log((each.delivered_ms or 0.0) / each.promise.predicted_ms) for each in told]
    widths = [_half_width(each.promise, e) for each, e in zip(told, errors, strict=True)]
    limits = [min(_FARTHEST * width, math.log(MOST_MOVED)) for width in widths]
    heard = [max(-most, min(most, e)) for e, most in zip(errors, limits, strict=True)]
    shift = len(told) / (len(told) + PRIOR) * median(heard)
    misses = [min(abs(e - shift) / w, _FARTHEST) for e, w in zip(errors, widths, strict=True)]
    squares = sum((_NORMAL * miss) ** 2 for miss in misses)
    stretch = max(1.0, math.sqrt((PRIOR + squares) / (PRIOR + len(told))))
    return Lesson(deliveries=len(told), shift=shift, stretch=stretch)


def _half_width(promise: Promise, error: float) -> float:
    end = promise.high_ms if error > 0 else promise.low_ms
    width = abs(math.log(end / promise.predicted_ms)) if end > 0 else 0.0
    return max(width, _NARROWEST)


def _summary(name: str, kept: Sequence[Kept]) -> Summary:
    from statistics import median

    errors = [each.error for each in kept if each.error is not None]
    inside = [each.inside for each in kept if each.inside is not None]
    return Summary(
        name=name,
        promised=len(kept),
        delivered=len(errors),
        median_error=median(abs(error) for error in errors) if errors else None,
        median_bias=median(errors) if errors else None,
        inside=sum(inside) / len(inside) if inside else None,
    )
