"""Training through a parameter server, in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from stepscope.explain.together.words import describe_staleness
from stepscope.records.figures import milliseconds, percent, significant, size
from stepscope.records.words import counted
from stepscope.ui.terminal.console import text_line
from stepscope.ui.terminal.tables import titled_table
from stepscope.ui.together import histogram_rows, together_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from stepscope.records.together_summary import TogetherSummary, WorkerShare

_BAR = 40  # characters of the longest bar
_MOST_WORKERS = 16


def together_sections(summary: TogetherSummary, top: int) -> list[RenderableType]:
    workers, shards = len(summary.workers), len(summary.shards)
    title = f"parameter server: {counted(workers, 'worker')}, {counted(shards, 'shard')}"
    out: list[RenderableType] = [text_line(title, style="bold"), Text(together_line(summary))]
    out += [Text(summary.why), Text(), _workers(summary), Text()]
    if summary.blocks:
        out += [_blocks(summary, top), Text()]
    out += [_shards(summary), Text()]
    if summary.staleness.pulls:
        out += [_staleness(summary), Text(describe_staleness(summary)[0]), Text()]
    return out


def _workers(summary: TogetherSummary) -> Table:
    columns = (">worker", ">steps", ">step", ">own work", ">blocked", ">pull", ">push", ">other")
    table = titled_table("workers, mean step", *columns, ">sent", ">received", ">behind")
    for worker in summary.workers[:_MOST_WORKERS]:
        table.add_row(*_worker_row(worker))
    if len(summary.workers) > _MOST_WORKERS:
        table.add_row("…", f"{len(summary.workers) - _MOST_WORKERS} more")
    return table


def _worker_row(worker: WorkerShare) -> tuple[str, ...]:
    def mean(ns: int) -> str:
        return milliseconds(ns / 1e6 / worker.steps)

    return (
        str(worker.worker),
        f"{worker.steps:,}",
        mean(worker.whole_ns),
        mean(worker.compute_ns),
        mean(worker.blocked_ns),
        mean(worker.pull_ns),
        mean(worker.push_ns),
        mean(worker.other_ns),
        size(worker.pushed_bytes),
        size(worker.pulled_bytes),
        "-" if worker.mean_gap is None else significant(worker.mean_gap),
    )


def _blocks(summary: TogetherSummary, top: int) -> Table:
    table = titled_table("who waits for whom", ">worker", ">waits for", ">in all", ">times")
    for pair in summary.blocks[:top]:
        waited = milliseconds(pair.blocked_ns / 1e6)
        table.add_row(str(pair.worker), str(pair.by), waited, f"{pair.times:,}")
    return table


def _shards(summary: TogetherSummary) -> Table:
    columns = (
        ">shard",
        ">parameters",
        ">updates",
        ">pulls",
        ">busy",
        ">queue",
        ">longest",
        ">wait",
    )
    table = titled_table("server load", *columns)
    for shard in summary.shards:
        table.add_row(
            str(shard.shard),
            "-" if shard.size_bytes is None else size(shard.size_bytes),
            f"{shard.updates:,}",
            f"{shard.pulls:,}",
            percent(shard.busy_share),
            "-" if shard.mean_queue is None else significant(shard.mean_queue),
            "-" if shard.largest_queue is None else str(shard.largest_queue),
            "-" if shard.mean_wait_ms is None else milliseconds(shard.mean_wait_ms),
        )
    return table


def _staleness(summary: TogetherSummary) -> Table:
    table = titled_table("staleness", ">steps behind", ">pulls", "")
    rows = histogram_rows(summary.staleness)
    most = max(count for _, count in rows)
    for words, count in rows:
        table.add_row(words, f"{count:,}", "█" * round(_BAR * count / most))
    return table
