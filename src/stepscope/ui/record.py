"""The track record in sentences and as JSON."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from stepscope.records.words import counted
from stepscope.ui.comparison import SCHEMA, Words, percent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepscope.records.promise import Delivery, Promise, TrackedPromise
    from stepscope.verify.track_record import Summary


def words_of(kept: Sequence[TrackedPromise]) -> Words:
    errors = [abs(each.error) for each in kept if each.error is not None]
    waiting = len(kept) - len(errors)
    compare = "stepscope compare BEFORE AFTER, or stepscope ab -- COMMAND --- COMMAND"
    if not kept:
        return Words(
            verdict="Nothing was promised on this host yet.",
            why="stepscope whatif --remember writes down what it predicts",
            next="stepscope whatif PATH --set NAME=VALUE --remember",
        )
    if not errors:
        return Words(
            verdict=f"{counted(waiting, 'promise')}, none of them tried yet.",
            why="no comparison has shown one of these changes alone",
            next=f"make the change, then {compare}",
        )
    inside = sum(bool(each.inside) for each in kept if each.inside is not None)
    who = "half of them" if len(errors) > 1 else "it"
    return Words(
        verdict=(
            f"{counted(len(errors), 'promise')} tried: {who} came within "
            f"{percent(median(errors))} of what was promised."
        ),
        why=f"{inside} of {len(errors)} lie inside the promised interval; {waiting} still open",
        next=f"try the open ones: {compare}" if waiting else "ask stepscope whatif for more",
    )


def unread_words(unread: int) -> str:
    """Of lines in the record that nobody can read any more."""
    return (
        f"{counted(unread, 'line')} of the record cannot be read: left out here, kept in the file"
    )


def ignored_words(delivery: Delivery, why: str) -> str:
    """Of a delivery in the record that teaches nothing."""
    return (
        f"a delivery of {delivery.promise} ({delivery.a_ms:.2f} -> {delivery.b_ms:.2f} ms) is not "
        f"counted: {why}"
    )


def forgotten_words(promise: Promise, *, delivery_only: bool) -> str:
    if delivery_only:
        return f"forgot what was delivered of {promise.id} ({promise.words}): it is open again"
    return f"forgot {promise.id} ({promise.words})"


def record_json(
    kept: Sequence[TrackedPromise],
    rows: Sequence[Summary],
    folder: Path,
    unread: int = 0,
    ignored: Sequence[tuple[Delivery, str]] = (),
) -> dict[str, Any]:
    """`record --json`."""
    words = words_of(kept)
    return {
        "schema": SCHEMA,
        "verdict": words.verdict,
        "why": words.why,
        "next": words.next,
        "folder": str(folder),
        "unread_lines": unread,
        "ignored": [{**to_builtins(delivery), "why": why} for delivery, why in ignored],
        "what_ifs": [to_builtins(row) for row in rows],
        "promises": [
            {
                **to_builtins(each.promise),
                "name": each.promise.name,
                "delivery": to_builtins(each.delivery),
                "delivered_ms": each.delivered_ms,
                "error": each.error,
                "inside": each.inside,
            }
            for each in kept
        ],
    }
