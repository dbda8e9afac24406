"""Keep the track record on disk: what `whatif` predicted, what comparisons measured, what to
learn from it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.records.folders import node_name, user_folder
from stepscope.records.normal import NORMAL_95_PRECISE
from stepscope.records.prediction import (
    RECORD_SCHEMA,
    Delivery,
    Forgotten,
    Prediction,
    Promise,
    TrackedPromise,
    Workload,
)
from stepscope.records.quality import encode_json
from stepscope.text.figures import milliseconds, signed_percent
from stepscope.trace.files import LineFile, open_to_append

# answered_predictions.py decides which promise a comparison answers.

# Deliveries that weigh as much as the prediction itself.
PRIOR = 4
# No promised interval is taken to be narrower than this share.
NARROWEST = 0.01
_FARTHEST = 2.0  # half-widths: no delivery counts as farther off
MOST_MOVED = 1.25  # the largest factor by which the record changes a prediction
ANY_BASELINE = 2.0  # largest ratio of A's step to the promise's if the user names the promise
VAGUE = 1.25  # a measured change with a wider interval, each way, answers nothing


class Lesson(msgspec.Struct, frozen=True, kw_only=True):
    """What earlier deliveries of one what-if say about its next prediction."""

    deliveries: int
    shift: float  # logarithm of the factor on the step
    stretch: float  # factor on the logarithms of the distances to both ends


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The track record of one what-if."""

    name: str
    promised: int
    delivered: int
    median_error: float | None  # of |delivered / predicted - 1|
    median_bias: float | None  # of delivered / predicted - 1: above zero is slower
    inside: float | None  # share of deliveries inside the promised interval


def make_promise(
    prediction: Prediction, workload: Workload | None = None, path: str | None = None
) -> Promise:
    """Make a promise with an id of its own, now, on this host."""
    import secrets

    return Promise(
        id=secrets.token_hex(4),
        when_unix=time.time(),
        host=node_name(),
        settings=prediction.settings,
        baseline_ms=prediction.baseline_ms,
        predicted_ms=prediction.predicted_ms,
        low_ms=prediction.low_ms,
        high_ms=prediction.high_ms,
        workload=workload or Workload(),
        path=path,
        basis=prediction.basis,
    )


def remember(promise: Promise) -> Promise:
    """Append it to the record; raises UsageError if that is not possible.

    The same open promise is not recorded twice: one trial would answer it twice.
    """
    if not (promise.settings and promise.predicted_ms > 0 and promise.baseline_ms > 0):
        raise UsageError("a prediction needs a what-if, a baseline and a predicted step")
    known = next((other for other in open_promises() if _is_same(other, promise)), None)
    if known is not None:
        return known
    append(promise)
    return promise


def _is_same(one: Promise, other: Promise) -> bool:
    return msgspec.structs.replace(one, id=other.id, when_unix=other.when_unix) == other


def history(host: str | None = None, *, every_host: bool = False) -> tuple[TrackedPromise, ...]:
    """All promises of a host (None: this one), oldest first, each with its newest delivery.

    Forgotten promises are left out, and so are deliveries that do not count by today's rules.
    """
    lines = read_lines()
    wanted = host or node_name()
    promises = _remembered(lines)
    deliveries: dict[str, Delivery] = {}
    for line in _deliveries(lines, promises):
        if why_ignored(promises[line.promise], line) is None:
            known = deliveries.get(line.promise, line)
            deliveries[line.promise] = max(known, line, key=lambda delivery: delivery.when_unix)
    kept = [
        TrackedPromise(promise=promise, delivery=deliveries.get(promise.id))
        for promise in promises.values()
        if every_host or promise.host == wanted
    ]
    return tuple(sorted(kept, key=lambda row: row.promise.when_unix))


def ignored_deliveries(
    host: str | None = None, *, every_host: bool = False
) -> tuple[tuple[Delivery, str], ...]:
    """Deliveries in the file that do not count, each with the reason."""
    lines = read_lines()
    wanted = host or node_name()
    promises = _remembered(lines)
    judged = [
        (line, why_ignored(promises[line.promise], line))
        for line in _deliveries(lines, promises)
        if every_host or promises[line.promise].host == wanted
    ]
    return tuple((line, why) for line, why in judged if why is not None)


def why_ignored(promise: Promise, delivery: Delivery) -> str | None:
    """Return why a delivery does not count by today's rules; None if it counts."""
    if not delivery.named and not delivery.seen:
        return "nothing shows that the predicted change was made"
    if delivery.basis != promise.basis:
        return (
            f"it is about {delivery.basis} steps, but the prediction is about {promise.basis} steps"
        )
    return off_baseline(promise, delivery.a_ms) or too_vague(delivery.low, delivery.high)


def off_baseline(promise: Promise, a_ms: float, within: float = ANY_BASELINE) -> str | None:
    """Return why A's step cannot be the one the promise is about."""
    if abs(math.log(a_ms / promise.baseline_ms)) <= math.log(within):
        return None
    step, baseline = milliseconds(a_ms), milliseconds(promise.baseline_ms)
    return f"A's step takes {step}, but the prediction is about {baseline}"


def too_vague(low: float, high: float) -> str | None:
    """Return why a measured change is too uncertain to answer a promise."""
    half = (math.log1p(high) - math.log1p(low)) / 2 if low > -1 else math.inf
    if half <= math.log(VAGUE):
        return None
    return (
        f"the change is only known to lie between {signed_percent(low)} and {signed_percent(high)}"
    )


def open_promises(host: str | None = None) -> tuple[Promise, ...]:
    """Promises that no comparison has answered yet, newest first."""
    return tuple(row.promise for row in reversed(history(host)) if row.delivery is None)


def find_promise(promise_id: str) -> Promise:
    """Find it by its id, or by a beginning of it that no other has."""
    promises = [row.promise for row in history(every_host=True)]
    matches = [promise for promise in promises if promise.id.startswith(promise_id)]
    exact = [promise for promise in matches if promise.id == promise_id]
    if len(exact or matches) == 1:
        return (exact or matches)[0]
    raise UsageError(
        f"{promise_id}: {'more than one' if matches else 'no'} prediction has that id. "
        "stepscope whatif --history lists them"
    )


def forget(promise_id: str, *, delivery_only: bool = False) -> Promise:
    """Stop counting a promise, or only its deliveries so far: then it is open again.

    This appends a line to the record; nothing is overwritten.
    """
    promise = find_promise(promise_id)
    append(Forgotten(promise=promise.id, when_unix=time.time(), delivery_only=delivery_only))
    return promise


def forget_all_of(name: str, *, delivery_only: bool = False) -> tuple[Promise, ...]:
    """Forget every promise of one what-if on this host, such as precision."""
    named = [row.promise for row in history() if row.promise.name == name]
    if not named:
        raise UsageError(
            f"--all-of {name}: no prediction has that name. stepscope whatif --history lists them"
        )
    return tuple(forget(promise.id, delivery_only=delivery_only) for promise in named)


def _remembered(lines: Sequence[Line]) -> dict[str, Promise]:
    forgotten = {x.promise for x in lines if isinstance(x, Forgotten) and not x.delivery_only}
    return {x.id: x for x in lines if isinstance(x, Promise) and x.id not in forgotten}


def _deliveries(lines: Sequence[Line], promises: dict[str, Promise]) -> list[Delivery]:
    """Deliveries of these promises, without those that were forgotten later."""
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


def summarise(kept: Sequence[TrackedPromise]) -> tuple[Summary, ...]:
    """One row per what-if, the most delivered first."""
    names = dict.fromkeys(row.promise.name for row in kept)
    rows = [_summary(name, [row for row in kept if row.promise.name == name]) for name in names]
    return tuple(sorted(rows, key=lambda row: (-row.delivered, -row.promised, row.name)))


def adjust(
    name: str, predicted_ms: float, low: float, high: float, history: Sequence[TrackedPromise]
) -> tuple[float, float, float]:
    """Shift and widen a prediction by the deliveries of earlier ones of the same what-if."""
    lesson = learn(name, history)
    if lesson is None or not 0 < low <= predicted_ms <= high:
        return predicted_ms, low, high
    below = max(math.log(predicted_ms / low), NARROWEST) * lesson.stretch
    above = max(math.log(high / predicted_ms), NARROWEST) * lesson.stretch
    moved = predicted_ms * math.exp(lesson.shift)
    return moved, moved * math.exp(-below), moved * math.exp(above)


def learn(name: str, history: Sequence[TrackedPromise]) -> Lesson | None:
    """Return what the deliveries of one what-if say about its next prediction; None without any.

    For n deliveries, e is ln(delivered / predicted) of each, and h is the logarithm of the promised
    half-width on the side where e lies:

        shift   = n / (n + 4) x median(e), each e limited to 2 h and to ln 1.25
        stretch = sqrt((4 + sum((1.96 miss)^2)) / (4 + n)), at least 1
        miss    = |e - shift| / h, limited to 2

    One delivery, however far off, shifts a prediction by at most 4.6% and at most doubles its
    interval.
    """
    tried = [row for row in history if row.promise.name == name and row.delivered_ms is not None]
    if not tried:
        return None
    from statistics import median

    errors = [math.log((row.delivered_ms or 0.0) / row.promise.predicted_ms) for row in tried]
    widths = [_half_width(row.promise, e) for row, e in zip(tried, errors, strict=True)]
    limits = [min(_FARTHEST * width, math.log(MOST_MOVED)) for width in widths]
    limited = [max(-most, min(most, e)) for e, most in zip(errors, limits, strict=True)]
    shift = len(tried) / (len(tried) + PRIOR) * median(limited)
    misses = [min(abs(e - shift) / w, _FARTHEST) for e, w in zip(errors, widths, strict=True)]
    squares = sum((NORMAL_95_PRECISE * miss) ** 2 for miss in misses)
    stretch = max(1.0, math.sqrt((PRIOR + squares) / (PRIOR + len(tried))))
    return Lesson(deliveries=len(tried), shift=shift, stretch=stretch)


def _half_width(promise: Promise, error: float) -> float:
    end = promise.high_ms if error > 0 else promise.low_ms
    width = abs(math.log(end / promise.predicted_ms)) if end > 0 else 0.0
    return max(width, NARROWEST)


def _summary(name: str, kept: Sequence[TrackedPromise]) -> Summary:
    from statistics import median

    errors = [row.error for row in kept if row.error is not None]
    inside = [row.inside for row in kept if row.inside is not None]
    return Summary(
        name=name,
        promised=len(kept),
        delivered=len(errors),
        median_error=median(abs(error) for error in errors) if errors else None,
        median_bias=median(errors) if errors else None,
        inside=sum(inside) / len(inside) if inside else None,
    )


# The track record on disk: JSON lines, one file per host, only ever appended to.
#
# Several processes may write at once: each line is one write, under a lock. If a kill cut a line
# short, the next writer closes it and readers skip it.

try:
    import fcntl
except ImportError:  # Windows: each line is still one write
    fcntl = None  # type: ignore[assignment]

Line = Promise | Delivery | Forgotten
_LINES: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def record_folder() -> Path:
    """$STEPSCOPE_RECORD, or a folder in the user's configuration."""
    return user_folder("STEPSCOPE_RECORD", "record")


def append(line: Line) -> None:
    """Add one whole line to this host's file."""
    path = record_folder() / f"{_file_name(node_name())}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open_to_append(path)
        try:
            _lock(handle)
            _write(handle, encode_json(line) + b"\n")
        finally:
            os.close(handle)
    except (OSError, UnreadableInputError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a regular file"
        raise UsageError(
            f"the track record cannot be written: {path}: {why}. Set STEPSCOPE_RECORD to a "
            "folder that you can write"
        ) from None


def read_lines() -> list[Line]:
    """The lines of every host that shares the folder, each file's in the order written.

    Lines that are not ours, or of an unknown schema, are left out: see `count_unread`.
    """
    return [line for line in map(_parse, _rows()) if line is not None]


def count_unread() -> int:
    """Return how many lines are left out. They stay in the file: nothing is ever overwritten."""
    return sum(_parse(row) is None for row in _rows())


def _rows() -> Iterator[bytes]:
    """An unreadable file, and a line too long to be ours, count as an empty line."""
    for path in sorted(record_folder().glob("*.jsonl")):
        lines = LineFile(path)
        try:
            yield from (line.text for line in lines)
        except UnreadableInputError:
            yield b""
        yield from [b""] * lines.too_long


def _parse(row: bytes) -> Line | None:
    try:
        line = _LINES.decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return line if line.schema == RECORD_SCHEMA and _is_sound(line) else None


def _is_sound(line: Line) -> bool:
    """A prediction lies in its interval, unless somebody edited the file."""
    return not isinstance(line, Promise) or line.low_ms <= line.predicted_ms <= line.high_ms


def _write(handle: int, line: bytes) -> None:
    size = os.lseek(handle, 0, os.SEEK_END)
    if size:
        os.lseek(handle, size - 1, os.SEEK_SET)
        if os.read(handle, 1) != b"\n":
            line = b"\n" + line
    if os.write(handle, line) != len(line):
        raise OSError(28, "No space left on device")


def _lock(handle: int) -> None:
    """Until the handle is closed. Some network disks have no locks: a single write must do."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)


def _file_name(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", host) or "host"
