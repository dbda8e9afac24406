"""Training through a parameter server, as every surface shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

if TYPE_CHECKING:
    from stepscope.records.together_summary import (
        ConsistencyPromise,
        Staleness,
        TogetherSummary,
        TogetherVerdict,
    )

VERDICTS: dict[TogetherVerdict, str] = {
    "pays": "it pays",
    "does not pay": "it does not pay",
    "barrier": "all wait for the slowest",
    "one worker": "one worker",
}
_MOST_BINS = 12


def histogram_rows(staleness: Staleness) -> list[tuple[str, int]]:
    """Steps behind and how many pulls; neighbours share a row where there are many."""
    counts = staleness.counts
    width = -(-len(counts) // _MOST_BINS)
    rows = []
    for first in range(0, len(counts), width or 1):
        last = min(first + width, len(counts)) - 1
        words = str(first) if first == last else f"{first} to {last}"
        rows.append((words, sum(counts[first : last + 1])))
    return rows


def together_json(summary: TogetherSummary) -> dict[str, Any]:
    """`together` of `explain --json`; its notes are among those of the job."""
    answer: dict[str, Any] = to_builtins(summary)
    del answer["notes"]
    return answer | {"gain": summary.gain, "staleness": staleness_json(summary.staleness)}


def promise_json(promise: ConsistencyPromise | None) -> dict[str, Any] | None:
    """`consistency` of `whatif --json`."""
    if promise is None:
        return None
    return {**to_builtins(promise), "staleness": staleness_json(promise.staleness)}


def staleness_json(staleness: Staleness) -> dict[str, Any]:
    return {
        "pulls": staleness.pulls,
        "mean": staleness.mean,
        "largest": staleness.largest,
        "counts": list(staleness.counts),
    }
