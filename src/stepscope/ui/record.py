"""The track record in sentences and as JSON."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from stepscope.records.figures import (
    interval,
    milliseconds,
    percent,
    signed_percent,
    significant,
    unsigned_percent,
)
from stepscope.records.words import counted
from stepscope.ui.answer import Answer
from stepscope.ui.comparison import SCHEMA
from stepscope.ui.words import or_dash

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.records.promise import Delivery, Promise, TrackedPromise
    from stepscope.verify.track_record import Summary

SUMMARY_COLUMNS = ("change", "predicted", "measured", "median error", "bias", "inside")
PROMISE_COLUMNS = ("id", "when", "change", "before", "predicted", "measured", "error")


def record_answer(kept: Sequence[TrackedPromise]) -> Answer:
    errors = [abs(row.error) for row in kept if row.error is not None]
    waiting = len(kept) - len(errors)
    compare = "stepscope compare BEFORE AFTER, or stepscope ab -- COMMAND --- COMMAND"
    if not kept:
        return Answer(
            verdict="No prediction is recorded on this machine yet.",
            why="stepscope whatif --remember records what it predicts",
            next="stepscope whatif PATH --set NAME=VALUE --remember",
        )
    if not errors:
        return Answer(
            verdict=f"{counted(waiting, 'prediction')}, none of them measured yet.",
            why="no comparison has measured one of these changes alone",
            next=f"make the change, then {compare}",
        )
    inside = sum(bool(row.inside) for row in kept)
    who = "half of them" if len(errors) > 1 else "it"
    return Answer(
        verdict=(
            f"{counted(len(errors), 'prediction')} measured: {who} came within "
            f"{unsigned_percent(median(errors))} of the result."
        ),
        why=(
            f"{inside} of {len(errors)} results lie in the predicted 95% interval. {waiting} "
            "predictions are still open"
        ),
        next=f"measure the open ones: {compare}"
        if waiting
        else "predict more changes with stepscope whatif",
    )


def summary_cells(row: Summary) -> list[str]:
    """A what-if's row, as SUMMARY_COLUMNS has it."""
    return [
        row.name,
        str(row.promised),
        str(row.delivered),
        or_dash(row.median_error, unsigned_percent),
        or_dash(row.median_bias, signed_percent),
        or_dash(row.inside, percent),
    ]


def promise_cells(kept: TrackedPromise) -> list[str]:
    """A promise's row, as PROMISE_COLUMNS has it."""
    promise, delivered, error = kept.promise, kept.delivered_ms, kept.error
    return [
        promise.id,
        time.strftime("%Y-%m-%d %H:%M", time.localtime(promise.when_unix)),
        promise.words,
        milliseconds(promise.baseline_ms),
        f"{significant(promise.predicted_ms)} ({interval(promise.low_ms, promise.high_ms)})",
        "open" if delivered is None else milliseconds(delivered),
        or_dash(error, signed_percent),
    ]


def newest_first(kept: Sequence[TrackedPromise]) -> list[TrackedPromise]:
    return sorted(kept, key=lambda row: -row.promise.when_unix)


def unread_words(unread: int) -> str:
    return (
        f"{counted(unread, 'line')} of the record cannot be read. The file keeps them, this "
        "list leaves them out"
    )


def ignored_words(delivery: Delivery, why: str) -> str:
    return (
        f"a result for {delivery.promise} ({significant(delivery.a_ms)} -> "
        f"{milliseconds(delivery.b_ms)}) does not count: {why}"
    )


def forgotten_words(promise: Promise, *, delivery_only: bool) -> str:
    if delivery_only:
        return f"removed the result of {promise.id} ({promise.words}). The prediction is open again"
    return f"removed {promise.id} ({promise.words})"


def record_json(
    kept: Sequence[TrackedPromise],
    rows: Sequence[Summary],
    folder: Path,
    unread: int = 0,
    ignored: Sequence[tuple[Delivery, str]] = (),
) -> dict[str, Any]:
    """`record --json`."""
    return {
        "schema": SCHEMA,
        **to_builtins(record_answer(kept)),
        "folder": str(folder),
        "unread_lines": unread,
        "ignored": [{**to_builtins(delivery), "why": why} for delivery, why in ignored],
        "what_ifs": [to_builtins(row) for row in rows],
        "promises": [
            {
                **to_builtins(row.promise),
                "name": row.promise.name,
                "delivery": to_builtins(row.delivery),
                "delivered_ms": row.delivered_ms,
                "error": row.error,
                "inside": row.inside,
            }
            for row in kept
        ],
    }
