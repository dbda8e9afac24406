"""A saved file whose command was run again: whether the new results agree with the saved ones."""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.bench.against import compare_results
from stepscope.records.bench_result import BenchResults, Rerun
from stepscope.records.figures import unsigned_percent


def with_rerun(base: BenchResults, now: BenchResults, path: str) -> BenchResults:
    """The saved results with one more entry in `reruns`."""
    changes = compare_results(base, now, path).workloads
    compared = [change for change in changes if change.verdict != "not comparable"]
    differs = tuple(
        f"{change.name} is {unsigned_percent(change.counted_change or 0.0)} {change.verdict}"
        for change in compared
        if change.verdict != "no difference seen"
    )
    rerun = Rerun(
        started_unix=now.started_unix,
        host=now.machine.host if now.machine else "",
        stepscope=now.stepscope,
        agrees=not differs if compared else None,
        differs=differs,
    )
    return replace(base, reruns=(*base.reruns, rerun))
