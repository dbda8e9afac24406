"""A bench's answer in sentences, for every surface."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from stepscope.records.figures import interval, percent, significant
from stepscope.records.words import counted
from stepscope.ui.answer import Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.records.bench_comparison import WorkloadChange
    from stepscope.records.bench_result import BenchResults, WorkloadResult

_MOST_NAMES = 6  # in a sentence


def row_name(row: WorkloadResult | WorkloadChange) -> str:
    """gpt2, gpt2 with bf16 + fused-optimizer."""
    return f"{row.name} with {' + '.join(row.remedies)}" if row.remedies else row.name


def row_names(rows: Sequence[WorkloadResult]) -> list[str]:
    """Rows of one name, those of a scaling study, are told apart by batch and ranks."""
    names = [row_name(row) for row in rows]
    return [
        f"{name}, batch {row.settings.get('batch')}, {counted(row.ranks, 'rank')}"
        if names.count(name) > 1
        else name
        for name, row in zip(names, rows, strict=True)
    ]


def bench_answer(results: BenchResults) -> Answer:
    return Answer(verdict=_verdict(results), why=_why(results.workloads), next=_next(results))


def _verdict(results: BenchResults) -> str:
    rows = results.workloads
    measured = [row for row in rows if row.status == "measured"]
    missed = [row for row in measured if row.target_reached is False]
    each_once = len({row.name for row in rows}) == len(rows)
    of_all = counted(len(rows), "workload" if each_once else "row")
    if len(measured) < len(rows):
        others = [row_name(row) for row in rows if row.status != "measured"]
        more = f" and {len(others) - _MOST_NAMES} more" if len(others) > _MOST_NAMES else ""
        named = ", ".join(others[:_MOST_NAMES])
        return f"{len(measured)} of {of_all} measured. Not measured: {named}{more}"
    if missed:
        names = ", ".join(map(row_name, missed))
        return f"{of_all} measured. The loss of {names} did not reach its target"
    known = sum(row.target_reached is True for row in measured)
    return f"{of_all} measured" + (f". {known} reached the target loss" if known else "")


def _why(rows: Sequence[WorkloadResult]) -> str:
    """The range of each share over the workloads, with the names at its ends."""
    sentences = [
        _range("the device works for", rows, lambda row: row.busy, "of the step"),
        _range("MFU is", rows, lambda row: row.mfu, ""),
        _range("the processor's cores are busy for", rows, lambda row: row.cpu, ""),
    ]
    return "; ".join(filter(None, sentences)) or "nothing was measured"


def _range(
    words: str,
    rows: Sequence[WorkloadResult],
    of: Callable[[WorkloadResult], float | None],
    after: str,
) -> str:
    known = sorted(
        (
            (value, name)
            for row, name in zip(rows, row_names(rows), strict=True)
            if (value := of(row)) is not None
        ),
        key=lambda pair: pair[0],
    )
    if not known:
        return ""
    (low, lowest), (high, highest) = known[0], known[-1]
    share = percent(high)
    if percent(low) != share:
        share = f"{percent(low)} ({lowest}) to {percent(high)} ({highest})"
    return f"{words} {share} {after}".rstrip()


def _next(results: BenchResults) -> str:
    failed = next((row for row in results.workloads if row.status == "failed" and row.folder), None)
    if failed is not None:
        return f"the output of {row_name(failed)} is in {failed.folder}/output.txt"
    if results.broken_rules:
        return f"these results support no claim yet: {results.broken_rules[0]}"
    slowest = min(
        (row for row in results.workloads if row.busy is not None and row.folder),
        key=lambda row: row.busy or 0.0,
        default=None,
    )
    if slowest is None:
        return "stepscope bench --list names the workloads"
    return f"stepscope explain {shlex.quote(slowest.folder or '')} explains {row_name(slowest)}"


def rerun_words(results: BenchResults) -> str:
    """Whether anybody has run a saved file's command again, and what came of it."""
    if not results.reruns:
        return "nobody has repeated this run yet: stepscope bench --again FILE does"
    last = results.reruns[-1]
    times = counted(len(results.reruns), "time")
    if last.agrees is None:
        return f"repeated {times}. The last one could not be compared"
    if last.agrees:
        return f"repeated {times}. The last one, on {last.host}, agrees"
    return f"repeated {times}. The last one, on {last.host}, does not agree: " + "; ".join(
        last.differs
    )


def speed_words(row: WorkloadResult) -> str:
    """1.34 (1.30 to 1.38): times as fast as without the remedies; "" where not compared."""
    if row.speedup is None:
        return ""
    if row.speedup_low is None or row.speedup_high is None:
        return significant(row.speedup)
    return f"{significant(row.speedup)} ({interval(row.speedup_low, row.speedup_high)})"
