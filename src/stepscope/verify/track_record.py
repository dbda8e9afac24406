"""Promised against delivered: what `whatif` said, what comparisons measured, what follows from it.

promise = make_promise(prediction, workload, path)    # in `whatif`
remember(promise)
ms, low, high = adjust(promise.name, ms, low, high, history())
deliver(comparison)                                   # in `compare` and `ab`
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import UsageError
from stepscope.records.promise import Delivery, Kept, Promise, Workload
from stepscope.trace.profiles import this_host
from stepscope.verify.record_file import append, read_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.comparison import Comparison
    from stepscope.records.prediction import Prediction

# So many deliveries weigh as much as what the prediction says of itself.
PRIOR = 4
# A promised interval is meant to hold this often: its half-width is that many standard deviations.
_NORMAL = 1.959964
# An interval narrower than this share says more than anybody knows.
_NARROWEST = 0.01
_FARTHEST = 10.0  # half-widths: one delivery that has nothing to do with its promise is one
# A baseline counts as A where they differ by less, however narrow A's interval is.
BASELINE_TOLERANCE = 0.02


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
    """All promises of a host (this one for None), oldest first, each with its newest delivery."""
    lines = read_lines()
    wanted = host or this_host()
    deliveries: dict[str, Delivery] = {}
    for line in lines:
        if isinstance(line, Delivery):
            known = deliveries.get(line.promise, line)
            deliveries[line.promise] = max(known, line, key=lambda each: each.when_unix)
    promises = {line.id: line for line in lines if isinstance(line, Promise)}
    kept = [
        Kept(promise=promise, delivery=deliveries.get(promise.id))
        for promise in promises.values()
        if every_host or promise.host == wanted
    ]
    return tuple(sorted(kept, key=lambda each: each.promise.when_unix))


def open_promises(host: str | None = None) -> tuple[Promise, ...]:
    """Those that no comparison has answered yet, newest first."""
    return tuple(each.promise for each in reversed(history(host)) if each.delivery is None)


def matching_promises(comparison: Comparison) -> tuple[Promise, ...]:
    """Open promises whose baseline is this comparison's A, newest first."""
    return tuple(promise for promise in open_promises() if _is_baseline(promise, comparison))


def deliver(comparison: Comparison, promise_id: str | None = None) -> Kept | None:
    """Answer a promise: the one that is named, else the newest open one that A is the baseline of.

    None where there is no such promise. Nothing is written for a comparison that is about profiled
    steps: promises are about steps without the profiler.
    """
    if comparison.steps_are == "profiled":
        if promise_id is not None:
            raise UsageError(
                "a promise is about steps without the profiler, and these are profiled ones: "
                "compare run folders (stepscope run) or use stepscope ab"
            )
        return None
    found = [_named(promise_id)] if promise_id is not None else matching_promises(comparison)
    promise = next(iter(found), None)
    if promise is None:
        return None
    delivery = Delivery(
        promise=promise.id,
        when_unix=time.time(),
        a_ms=comparison.a_ms,
        b_ms=comparison.b_ms,
        change=comparison.change,
        low=comparison.low,
        high=comparison.high,
        confidence=comparison.confidence,
        verdict=comparison.verdict,
        named=promise_id is not None,
    )
    append(delivery)
    return Kept(promise=promise, delivery=delivery)


def summarise(kept: Sequence[Kept]) -> tuple[Summary, ...]:
    """One row a what-if, the most delivered first."""
    names = dict.fromkeys(each.promise.name for each in kept)
    rows = [_summary(name, [each for each in kept if each.promise.name == name]) for name in names]
    return tuple(sorted(rows, key=lambda row: (-row.delivered, -row.promised, row.name)))


def adjust(
    name: str, predicted_ms: float, low: float, high: float, history: Sequence[Kept]
) -> tuple[float, float, float]:
    """A prediction moved and widened by what became of earlier ones of the same what-if.

    With n deliveries, e = ln(delivered / predicted) of each, and h the promised half-width, as a
    logarithm, on the side where e lies:

        shift   = n / (n + 4) x median(e)
        stretch = sqrt((4 + sum((1.96 (e - shift) / h)^2)) / (4 + n)), never below 1

    The step is multiplied by exp(shift), its distances to both ends, as logarithms, by stretch.
    """
    told = [each for each in history if each.promise.name == name and each.delivered_ms is not None]
    if not told or not 0 < low <= predicted_ms <= high:
        return predicted_ms, low, high
    from statistics import median

    errors = [math.log((each.delivered_ms or 0.0) / each.promise.predicted_ms) for each in told]
    shift = len(told) / (len(told) + PRIOR) * median(errors)
    missed = [
        min(abs(error - shift) / _half_width(each.promise, error), _FARTHEST)
        for each, error in zip(told, errors, strict=True)
    ]
    squares = sum((_NORMAL * each) ** 2 for each in missed)
    stretch = max(1.0, math.sqrt((PRIOR + squares) / (PRIOR + len(told))))
    below = max(math.log(predicted_ms / low), _NARROWEST) * stretch
    above = max(math.log(high / predicted_ms), _NARROWEST) * stretch
    moved = predicted_ms * math.exp(shift)
    return moved, moved * math.exp(-below), moved * math.exp(above)


def _half_width(promise: Promise, error: float) -> float:
    end = promise.high_ms if error > 0 else promise.low_ms
    width = abs(math.log(end / promise.predicted_ms)) if end > 0 else 0.0
    return max(width, _NARROWEST)


def _is_baseline(promise: Promise, comparison: Comparison) -> bool:
    if not promise.workload.may_be(comparison.workload):
        return False
    low = min(comparison.a_low_ms, comparison.a_ms * (1 - BASELINE_TOLERANCE))
    high = max(comparison.a_high_ms, comparison.a_ms * (1 + BASELINE_TOLERANCE))
    return low <= promise.baseline_ms <= high


def _named(promise_id: str) -> Promise:
    found = [
        each.promise for each in history(every_host=True) if each.promise.id.startswith(promise_id)
    ]
    if len(found) == 1:
        return found[0]
    raise UsageError(
        f"{promise_id}: {'no' if not found else 'more than one'} promise has that id; "
        "stepscope record lists them"
    )


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
