"""Training through a parameter server, as every surface shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from stepscope.records.figures import factor, significant

if TYPE_CHECKING:
    from stepscope.records.together_summary import (
        ConsistencyPromise,
        Staleness,
        TogetherSummary,
        TogetherVerdict,
        WorkerShare,
    )

VERDICTS: dict[TogetherVerdict, str] = {
    "pays": "it pays",
    "does not pay": "it does not pay",
    "barrier": "all wait for the slowest",
    "one worker": "one worker",
}
# Where a worker's time goes, in the order of a step.
PARTS = {
    "blocked": "blocked",
    "pull": "pull",
    "compute": "own work",
    "push": "push",
    "other": "other code",
}
_MOST_BINS = 12


def together_line(summary: TogetherSummary) -> str:
    """The throughput and what a barrier would have given."""
    rate = f"{significant(summary.updates_per_s)} updates/s with {summary.consistency}"
    if summary.barrier_updates_per_s is None or summary.gain is None:
        return rate
    barrier = significant(summary.barrier_updates_per_s)
    against = f"{barrier} with a barrier at every step ({factor(summary.gain)}x)"
    return f"{rate}, {against}: {VERDICTS[summary.verdict]}"


def part_ns(worker: WorkerShare, name: str) -> int:
    """One of PARTS; together they are the worker's whole time."""
    ns: int = getattr(worker, f"{name}_ns")
    return ns


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
